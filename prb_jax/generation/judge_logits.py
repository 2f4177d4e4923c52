"""Verdicts from the logits of A and B: the conversations of both orders are one tree, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, DataError, quote
from prb_jax.generation.judge import Judgement
from prb_jax.generation.verdicts import default_figures, default_messages
from prb_jax.readouts.language_model import open_language_model
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.scoring.load import load_opened
from prb_jax.scoring.reader import IdsTooLongError
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.scoring.stream import stream_scores
from prb_jax.text.prompting import encode_prompts, prompt_texts
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import Tree

_PROBE = (Message("user", "A or B?"),)


@dataclass(frozen=True)
class LogitsWay:
    """Reads the probability of A against B where the reply would begin, in both orders.

    A response's score is the mean of its probabilities in the two orders.

    Attributes:
      model: a language model whose score is the probability of A among A and B.
      max_length: longest conversation in tokens.
    """

    model: RewardModel
    max_length: int | None = None

    def identity(self) -> Mapping[str, Any]:
        return {**self.model.identity(), "judge": "default", "way": "logits"}

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        return [0] * len(comparisons)

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        read = [self._tree(each, profile_posts) for each in comparisons]
        trees = [tree for tree, _ in read]
        found: list[np.ndarray] = [np.zeros(0)] * len(trees)
        for batch in stream_scores(
            cast(Sequence[Comparison], trees),
            encode=lambda part: list(cast(Sequence[Tree], part)),
            dispatch=self.model.dispatch,
            options=self.model.batch_options(),
        ):
            for index, row in zip(batch.indices, batch.scores, strict=True):
                found[index] = row
        return [
            _judgement(comparison, tree, dropped, values)
            for comparison, (tree, dropped), values in zip(comparisons, read, found, strict=True)
        ]

    def _tree(self, comparison: Comparison, profile_posts: int) -> tuple[Tree, int]:
        """The two conversations as a tree, and how many posts did not fit."""
        chat = self.model.reader.tokenizer
        assert isinstance(chat, ChatTokenizer)
        view = self.model.reader.view(ViewOptions(profile_posts=0, max_length=self.max_length))
        shown = min(profile_posts, len(comparison.profile))
        name = f"comparison {quote(comparison.id)}"
        for posts in range(shown, -1, -1):
            both = [default_messages(comparison, k, profile_posts=posts, reason=False) for k in (0, 1)]
            try:
                ids = encode_prompts(chat, both)
                return self.model.reader.encode_ids(ids, view=view, name=name), shown - posts
            except IdsTooLongError:
                if not posts:
                    raise
        raise AssertionError

    def figures(self, rows: Sequence[Mapping[str, Any]], right: Sequence[int]) -> dict[str, Any]:
        return default_figures(rows, right)


def _judgement(comparison: Comparison, tree: Tree, dropped: int, values: np.ndarray) -> Judgement:
    if not np.isfinite(values).all():
        raise DataError(f"comparison {quote(comparison.id)}: the judge's probabilities are {values.tolist()}")
    letters = ["A" if value > 0.5 else "B" if value < 0.5 else None for value in values.tolist()]
    share = (np.float32(values[0]) + (1 - np.float32(values[1]))) / 2
    return Judgement(
        0,
        letters,
        np.asarray([share, 1 - share], np.float32),
        tree.tokens,
        {"probability_of_a": values.astype(float).tolist()},
        dropped,
    )


def load_logits_way(model: str | Path, options: LoadOptions, *, max_length: int | None = None) -> LogitsWay:
    """Load a causal language model as a judge that is read at the logits of A and B.

    Raises:
      CheckpointError: it cannot be loaded, or its tokenizer has no token of its own for A or B at the start of a reply.
    """
    chat = open_language_model(model, options).chat()
    (prompt,) = prompt_texts(chat, [_PROBE])
    before, *after = chat.tokenize([prompt, prompt + "A", prompt + "B"])
    for letter, ids in zip("AB", after, strict=True):
        if len(ids) != len(before) + 1 or not np.array_equal(ids[:-1], before):
            raise CheckpointError(
                f"{model}: the tokenizer has no token of its own for {letter} at the start of a reply: judge with "
                "--reason, which reads the reply as text"
            )
    readout = "vocabulary:" + ",".join(str(int(ids[-1])) for ids in after)
    return LogitsWay(load_opened(open_model(model, replace(options, readout=readout))), max_length)
