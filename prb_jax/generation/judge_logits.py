"""Verdicts from the logits of A and B: the conversations of both orders are one tree, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, DataError, quote
from prb_jax.generation.judge import Judgement
from prb_jax.generation.verdicts import better, default_figures, default_messages
from prb_jax.models.head import Vocabulary
from prb_jax.readouts.labels import ALL_VALUES
from prb_jax.readouts.language_model import open_language_model
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.scoring.reader import IdsTooLongError
from prb_jax.scoring.reward_model import RewardModel, load_reward_model
from prb_jax.scoring.stream import stream_scores
from prb_jax.text.prompting import encode_prompts, prompt_texts
from prb_jax.text.tokenizer import ChatTokenizer, RenderError
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import Tree

MIN_MASS = 0.1
"""Least probability of A and B together that makes a verdict, where it is not said."""

_PROBE = (Message("user", "A or B?"),)


@dataclass(frozen=True)
class LogitsWay:
    """Reads the probability of A against B where the reply would begin, in both orders.

    A response's score is the mean of its probabilities in the two orders. Where A and B together are less probable than
    ``min_mass`` in one of the orders, the model would reply with something else: that is no verdict, and a tie.

    Attributes:
      model: a language model whose values are the probability of A among A and B, and that of both among all tokens.
      max_length: longest conversation in tokens.
      min_mass: least probability of A and B together that makes a verdict.
    """

    model: RewardModel
    max_length: int | None = None
    min_mass: float = MIN_MASS

    def identity(self) -> Mapping[str, Any]:
        return {**self.model.identity(), "judge": "default", "way": "logits", "min_mass": self.min_mass}

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        for each in comparisons:
            better(each)  # all are pairs
        return [0] * len(comparisons)

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        read = []
        for each in comparisons:

            def asked(posts: int, each: Comparison = each) -> list[tuple[Message, ...]]:
                return [default_messages(each, k, profile_posts=posts, reason=False) for k in (0, 1)]

            read.append(fitted_tree(self.model, each, asked, posts=profile_posts, max_length=self.max_length))
        found = tree_scores(self.model, [tree for tree, _ in read])
        return [
            self._judgement(comparison, tree, dropped, values)
            for comparison, (tree, dropped), values in zip(comparisons, read, found, strict=True)
        ]

    def figures(self, rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        masses = [mass for row in rows for mass in row["letter_mass"]]
        return default_figures(rows, [better(each) for each in comparisons]) | {
            "mean_letter_mass": float(np.mean(masses)),
            "low_letter_mass": sum(min(row["letter_mass"]) < self.min_mass for row in rows),
        }

    def _judgement(self, comparison: Comparison, tree: Tree, dropped: int, values: np.ndarray) -> Judgement:
        if not np.isfinite(values).all():
            raise DataError(
                f"comparison {quote(comparison.id)}: the judge's probabilities are {values.tolist()}"
            )
        of_a, masses = values.T
        letters = [
            None if mass < self.min_mass or value == 0.5 else "A" if value > 0.5 else "B"
            for value, mass in zip(of_a.tolist(), masses.tolist(), strict=True)
        ]
        share = (np.float32(of_a[0]) + (1 - np.float32(of_a[1]))) / 2
        if (masses < self.min_mass).any():
            share = np.float32(0.5)
        kept = {
            "first": 0,
            "verdicts": letters,
            "probability_of_a": of_a.astype(float).tolist(),
            "letter_mass": masses.astype(float).tolist(),
        }
        return Judgement(np.asarray([share, 1 - share], np.float32), tree.tokens, kept, dropped)


def fitted_tree(
    model: RewardModel,
    comparison: Comparison,
    asked: Callable[[int], Sequence[Sequence[Message]]],
    *,
    posts: int,
    max_length: int | None,
) -> tuple[Tree, int]:
    """Return conversations about a comparison as one tree, and how many posts of the profile did not fit.

    Args:
      model: that reads them where the reply would begin.
      comparison: for its profile, and for messages.
      asked: gives the conversations with so many posts.
      posts: at most.
      max_length: longest conversation in tokens; the model's own limit if not given.

    Raises:
      DataError: the conversations are too long without any post, or the chat template refuses them.
    """
    chat = model.reader.tokenizer
    assert isinstance(chat, ChatTokenizer)
    view = model.reader.view(ViewOptions(profile_posts=0, max_length=max_length))
    shown = min(posts, len(comparison.profile))
    name = f"comparison {quote(comparison.id)}"
    for tried in range(shown, -1, -1):
        try:
            ids = encode_prompts(chat, asked(tried))
            return model.reader.encode_ids(ids, view=view, name=name), shown - tried
        except IdsTooLongError:
            if not tried:
                raise
        except RenderError as error:
            raise DataError(f"{name}: {error.reason}") from error
    raise AssertionError


def tree_scores(model: RewardModel, trees: Sequence[Tree]) -> list[np.ndarray]:
    """Return the values float32 [K, n] of each tree, all that the head of the model gives."""
    found: list[np.ndarray] = [np.zeros(0)] * len(trees)
    for batch in stream_scores(
        cast(Sequence[Comparison], trees),
        encode=lambda part: list(cast(Sequence[Tree], part)),
        dispatch=model.dispatch,
        options=model.batch_options(),
    ):
        for index, row in zip(batch.indices, batch.scores, strict=True):
            found[index] = row
    return found


def load_logits_way(
    model: str | Path, options: LoadOptions, *, max_length: int | None = None, min_mass: float | None = None
) -> LogitsWay:
    """Load a causal language model as a judge that is read at the logits of A and B.

    Raises:
      CheckpointError: it cannot be loaded, or its tokenizer has no token of its own for A or B at the start of a reply.
    """
    tokens = reply_tokens(model, options, "AB")
    for letter in "AB":
        if letter not in tokens:
            raise CheckpointError(
                f"{model}: the tokenizer has no token of its own for {letter} at the start of a reply: judge with "
                "--reason, which reads the reply as text"
            )
    readout = f"vocabulary:{tokens['A']},{tokens['B']}"
    return LogitsWay(
        load_token_model(model, options, readout), max_length, MIN_MASS if min_mass is None else min_mass
    )


def load_token_model(model: str | Path, options: LoadOptions, readout: str) -> RewardModel:
    """Load a causal language model whose values are those of a read-out of tokens, and the probability of these tokens.

    Raises:
      CheckpointError: it cannot be loaded.
    """
    opened = open_model(model, replace(options, readout=readout))
    config = opened.decoder.config
    assert isinstance(config.head, Vocabulary)
    config = replace(config, head=replace(config.head, with_mass=True))
    return load_reward_model(replace(opened, body=replace(opened.decoder, config=config), labels=ALL_VALUES))


def reply_tokens(model: str | Path, options: LoadOptions, texts: Sequence[str]) -> dict[str, int]:
    """Return the token of each text that is a single one at the start of a reply.

    Raises:
      CheckpointError: the model is no causal language model, or cannot be opened.
    """
    chat = open_language_model(model, options).chat()
    (prompt,) = prompt_texts(chat, [_PROBE])
    before, *after = chat.tokenize([prompt, *(prompt + text for text in texts)])
    return {
        text: int(ids[-1])
        for text, ids in zip(texts, after, strict=True)
        if len(ids) == len(before) + 1 and np.array_equal(ids[:-1], before)
    }
