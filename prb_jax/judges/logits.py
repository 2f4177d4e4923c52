"""Judges that are read where their reply would begin: the conversations about a comparison are one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import DataError, quote
from prb_jax.generation.prompts import fit_posts
from prb_jax.models.head import Vocabulary
from prb_jax.readouts.heads import ALL_VALUES
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_language_model, open_model
from prb_jax.scoring.reward_model import RewardModel, load_reward_model
from prb_jax.scoring.stream import stream_scores
from prb_jax.text.prompting import encode_prompts, prompt_texts
from prb_jax.text.tokenizer import ChatTokenizer, RenderError
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import Tree

_PROBE = (Message("user", "A or B?"),)


@dataclass(frozen=True)
class ReplyValues:
    """The values of the conversations about one comparison, where a reply would begin.

    Attributes:
      values: float32 [K], of the read-out.
      masses: float32 [K], the probability of the read-out's tokens together, among all tokens.
      tokens: of the tree.
      posts_dropped: posts that did not fit.
    """

    values: np.ndarray
    masses: np.ndarray
    tokens: int
    posts_dropped: int


def load_token_model(model: str | Path, options: LoadOptions, readout: str) -> RewardModel:
    """Load a causal language model with two values: that of a read-out of tokens, and the probability of these tokens.

    Raises:
      CheckpointError: it cannot be loaded.
    """
    opened = open_model(model, replace(options, readout=readout))
    config = opened.decoder.config
    assert isinstance(config.head, Vocabulary)
    config = replace(config, head=replace(config.head, with_mass=True))
    return load_reward_model(replace(opened, body=replace(opened.decoder, config=config), labels=ALL_VALUES))


def read_replies(
    model: RewardModel,
    comparisons: Sequence[Comparison],
    ask: Callable[[Comparison, int], Sequence[Sequence[Message]]],
    *,
    posts: int,
    max_length: int | None,
) -> list[ReplyValues]:
    """Return the values of the conversations about each comparison, with as many posts of its profile as fit.

    Args:
      model: of :func:`load_token_model`.
      comparisons: for their profiles, and for messages.
      ask: gives the conversations about a comparison with so many posts.
      posts: at most.
      max_length: longest conversation in tokens; the model's own limit if not given.

    Raises:
      DataError: conversations that are too long without any post, or that the chat template refuses; a value that is
        not finite.
    """
    chat = model.reader.tokenizer
    assert isinstance(chat, ChatTokenizer)
    view = model.reader.view(ViewOptions(profile_posts=0, max_length=max_length))
    trees, dropped = [], []
    for comparison in comparisons:
        name = f"comparison {quote(comparison.id)}"

        def read(count: int, comparison: Comparison = comparison, name: str = name) -> Tree:
            try:
                ids = encode_prompts(chat, ask(comparison, count))
            except RenderError as error:
                raise DataError(f"{name}: {error.reason}") from error
            return model.reader.encode_ids(ids, view=view, name=name)

        most = min(posts, len(comparison.profile))
        tree, shown = fit_posts(read, most)
        trees.append(tree)
        dropped.append(most - shown)
    values: list[np.ndarray] = [np.zeros(0)] * len(trees)
    for batch in stream_scores(
        cast(Sequence[Comparison], trees),
        encode=lambda part: list(cast(Sequence[Tree], part)),
        dispatch=model.dispatch,
        options=model.batch_options(),
    ):
        for index, row in zip(batch.indices, batch.scores, strict=True):
            values[index] = row
    for comparison, row in zip(comparisons, values, strict=True):
        if not np.isfinite(row).all():
            raise DataError(
                f"comparison {quote(comparison.id)}: the judge's values are {row[:, 0].tolist()}, with the "
                f"probabilities {row[:, 1].tolist()} of their tokens"
            )
    return [
        ReplyValues(row[:, 0], row[:, 1], tree.tokens, lost)
        for row, tree, lost in zip(values, trees, dropped, strict=True)
    ]


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
