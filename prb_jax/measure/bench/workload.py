"""Workloads to time: trees of random tokens with the lengths of personalised data, and common training settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prb_jax.errors import RunError
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.named_shapes import QUESTION_TOKENS
from prb_jax.training.config import OptimizerSettings
from prb_jax.trees.tree import Tree, build_tree

PREFIX_SPREAD = 0.45  # standard deviation of log prefix lengths of ten-post profiles

RESPONSE_SPREAD = 0.25

STEPS = 1000
LEARNING_RATE = 1e-5
KL_COEFFICIENT = 0.04  # coefficient of the KL in a policy's loss

OPTIMIZER = OptimizerSettings(
    learning_rate=LEARNING_RATE,
    schedule="constant",
    warmup_share=0.0,
    weight_decay=0.0,
    b2=0.999,
    clip_norm=1.0,
)
"""Optimiser settings of both sides."""


@dataclass(frozen=True)
class TimedStep:
    """Wall seconds of one step, its loss, and its tokens with and without padding."""

    seconds: float
    loss: float
    padded_tokens: int
    tokens: int


@dataclass(frozen=True)
class Workload:
    """Comparisons as token ids; ``questions_per_user`` consecutive ones share a user."""

    name: str
    trees: tuple[Tree, ...]
    questions_per_user: int = 1

    @property
    def responses(self) -> int:
        """Responses over all trees."""
        return sum(len(tree.responses) for tree in self.trees)

    @property
    def tokens(self) -> int:
        """Tokens without padding over all trees."""
        return sum(tree.tokens for tree in self.trees)


def workload_for(
    config: DecoderConfig,
    options: BenchOptions,
    count: int,
    *,
    responses: int = 2,
    questions_per_user: int = 1,
) -> Workload:
    """Return a workload for a model, with the lengths of the options."""
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
    """Return the number of comparisons: the requested one, or enough users for the usual number.

    Raises:
      RunError: fewer are requested than one person has questions.
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

    ``questions_per_user`` consecutive trees begin with the same profile, each followed by a question of
    :data:`QUESTION_TOKENS`. Ids are drawn from the upper part of 0..vocab_size - 1.
    """
    rng = np.random.default_rng(seed)
    low = min(10, vocab_size // 2)

    def lengths(size: int, mean: int, spread: float, most: int) -> np.ndarray:
        drawn = rng.lognormal(0.0, spread, size)
        # The mean of few draws varies: scale it to the requested one.
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
