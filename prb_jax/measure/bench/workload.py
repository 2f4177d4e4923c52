"""What is timed: trees of random tokens with the lengths of personalised data, and what both sides train with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prb_jax.errors import RunError
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.named_shapes import QUESTION_TOKENS
from prb_jax.training.config import OptimizerSettings
from prb_jax.trees.tree import Tree, build_tree

PREFIX_SPREAD = 0.45  # standard deviation of the logarithm of prefix lengths, as ten-post profiles have it

RESPONSE_SPREAD = 0.25

STEPS = 1000
LEARNING_RATE = 1e-5
KL_COEFFICIENT = 0.04  # of the KL in the loss of a policy

OPTIMIZER = OptimizerSettings(
    learning_rate=LEARNING_RATE,
    schedule="constant",
    warmup_share=0.0,
    weight_decay=0.0,
    b2=0.999,
    clip_norm=1.0,
)
"""What both sides train with."""


@dataclass(frozen=True)
class TimedStep:
    """Wall seconds of one step, its loss, and the tokens it computed and needed."""

    seconds: float
    loss: float
    padded_tokens: int
    tokens: int


@dataclass(frozen=True)
class Workload:
    """Comparisons as token ids, of which so many in a row are one person's."""

    name: str
    trees: tuple[Tree, ...]
    questions_per_user: int = 1

    @property
    def responses(self) -> int:
        """Responses over all trees."""
        return sum(len(tree.responses) for tree in self.trees)

    @property
    def tokens(self) -> int:
        """Tokens that a tree needs, over all trees."""
        return sum(tree.tokens for tree in self.trees)


def workload_for(
    config: DecoderConfig,
    options: BenchOptions,
    count: int,
    *,
    responses: int = 2,
    questions_per_user: int = 1,
) -> Workload:
    """Return a workload of the lengths of the options, for a model."""
    return synthetic_workload(
        count,
        responses=responses,
        prefix_tokens=options.prefix_tokens,
        response_tokens=options.response_tokens,
        vocab_size=config.vocab_size,
        longest=config.max_position_embeddings,
        questions_per_user=questions_per_user,
    )


def count_pairs(asked: int | None, *, usual: int, questions_per_user: int) -> int:
    """Return how many comparisons are timed: those asked for, or as many users as hold the usual number.

    Raises:
      RunError: fewer are asked for than one person has questions.
    """
    if asked is None:
        return -(-usual // questions_per_user) * questions_per_user
    if asked < questions_per_user:
        raise RunError(
            f"pairs: expected at least {questions_per_user}, the questions of one user, found {asked}; "
            "ask for more pairs or for fewer questions per user"
        )
    return asked


def synthetic_workload(
    count: int,
    *,
    responses: int,
    prefix_tokens: int,
    response_tokens: int,
    vocab_size: int,
    longest: int,
    questions_per_user: int = 1,
    seed: int = 0,
) -> Workload:
    """Return trees of random ids; lengths are lognormal with the given means, at most ``longest`` for a conversation.

    So many trees in a row as one user has questions begin with the same profile, which a question of
    :data:`QUESTION_TOKENS` then follows in each. Ids are drawn from the upper part of 0..vocab_size - 1.
    """
    rng = np.random.default_rng(seed)
    low = min(10, vocab_size // 2)

    def lengths(size: int, mean: int, spread: float, most: int) -> np.ndarray:
        drawn = rng.lognormal(0.0, spread, size)
        # Few draws have a mean of their own: scaled to the one asked for.
        return np.clip(np.round(drawn * (mean / drawn.mean())), 2, most).astype(int)

    most_response = min(4 * response_tokens, longest // 2)
    people = -(-count // questions_per_user)
    prefixes = lengths(people, prefix_tokens, PREFIX_SPREAD, longest - most_response)
    trees: list[Tree] = []
    shared = np.zeros(0, np.int64)
    for number in range(count):
        person, question = divmod(number, questions_per_user)
        if question == 0:
            shared = rng.integers(low, vocab_size, prefixes[person])
        elif len(shared) > QUESTION_TOKENS:
            asked = rng.integers(low, vocab_size, QUESTION_TOKENS)
            shared = np.concatenate([shared[:-QUESTION_TOKENS], asked])
        sizes = lengths(responses, response_tokens, RESPONSE_SPREAD, most_response)
        ids = [rng.integers(low, vocab_size, n) for n in sizes]
        for place, response in enumerate(ids):
            # Neighbours differ in their first token, so the prefix is exactly the shared part.
            response[0] = place % 2
        trees.append(build_tree([np.concatenate([shared, response]) for response in ids]))
    name = f"K={responses}, {prefix_tokens}+{response_tokens} tokens"
    if questions_per_user > 1:
        name += f", {questions_per_user} a user"
    return Workload(name, tuple(trees), questions_per_user)
