"""From what a user asks for to prompts: token ids that a policy continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import DataError, quote, short_repr
from prb_jax.text.prompting import encode_prompts
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.tokenizer import ChatTokenizer, RenderError
from prb_jax.text.visible import visible

TOGETHER = 64
"""Prompts that are tokenised in one call."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a policy continues.

    Attributes:
      name: for messages: the id of the comparison, or the position.
      ids: int32 [p], at least one.
      posts_dropped: posts of the profile that did not fit.
    """

    name: str
    ids: np.ndarray
    posts_dropped: int = 0

    __repr__ = short_repr


def comparison_prompts(
    comparisons: Sequence[Comparison], chat: ChatTokenizer, *, profile_posts: int, limit: int
) -> list[Prompt]:
    """Return the prompts of comparisons: their questions, behind the first posts of the profiles.

    What does not fit is taken away as whole posts from the end of the profile, and counted.

    Args:
      comparisons: to be read; their responses are not looked at.
      chat: tokenizer and chat template.
      profile_posts: at most this many posts are shown.
      limit: most tokens of a prompt.

    Raises:
      DataError: a prompt that is too long without any post, or that the template refuses; names the comparison.
    """
    found: list[Prompt] = []
    for start in range(0, len(comparisons), TOGETHER):
        part = comparisons[start : start + TOGETHER]
        shown = [min(len(each.profile), profile_posts) for each in part]
        for each, posts, ids in zip(part, shown, _encode(part, shown, chat), strict=True):
            found.append(_fitted(each, posts, ids, chat, limit))
    return found


def _encode(comparisons: Sequence[Comparison], posts: Sequence[int], chat: ChatTokenizer) -> list[np.ndarray]:
    seen = [
        visible(each, profile_posts=count, protocol=TextProtocol.DEFAULT).prefix_messages
        for each, count in zip(comparisons, posts, strict=True)
    ]
    try:
        return encode_prompts(chat, seen)
    except RenderError as error:
        raise DataError(f"comparison {quote(comparisons[error.conversation].id)}: {error.reason}") from error


def _fitted(comparison: Comparison, posts: int, ids: np.ndarray, chat: ChatTokenizer, limit: int) -> Prompt:
    fits, low, high = ids, 0, posts + 1  # the smallest number of posts that is too many is in low..high
    if len(ids) > limit:
        fits, high = _encode([comparison], [0], chat)[0], posts
        if len(fits) > limit:
            raise DataError(
                f"comparison {quote(comparison.id)}: its prompt has {len(fits)} tokens without profile; expected at "
                f"most {limit}, so that the new tokens fit into the model's context"
            )
        while high - low > 1:
            middle = (low + high) // 2
            tried = _encode([comparison], [middle], chat)[0]
            if len(tried) <= limit:
                low, fits = middle, tried
            else:
                high = middle
        return Prompt(comparison.id, fits, posts - low)
    return Prompt(comparison.id, fits)


def given_prompts(
    data: Sequence[Any], chat: ChatTokenizer, *, profile_posts: int, limit: int, vocab_size: int
) -> list[Prompt]:
    """Return the prompts of a Python caller.

    Args:
      data: comparisons; texts (a user's message each); conversations, lists of {role, content}; or token ids.
      chat, profile_posts, limit: as of :func:`comparison_prompts`.
      vocab_size: ids are below it.

    Raises:
      DataError: anything else, or a prompt that is too long; names the position.
    """
    found: list[Prompt] = []
    for position, item in enumerate(data):
        where = f"prompt {position}"
        if isinstance(item, Comparison):
            found += comparison_prompts([item], chat, profile_posts=profile_posts, limit=limit)
            continue
        if isinstance(item, str):
            ids = encode_prompts(chat, [[Message("user", item)]])[0]
        elif isinstance(item, Sequence) and item and all(isinstance(part, Mapping) for part in item):
            comparison = Comparison(id=where, prompt=item, responses=["-"])
            found += comparison_prompts([comparison], chat, profile_posts=0, limit=limit)
            continue
        else:
            ids = _given_ids(item, where=where, vocab_size=vocab_size)
        if len(ids) > limit:
            raise DataError(
                f"{where}: has {len(ids)} tokens; expected at most {limit}, so that the new tokens fit into the "
                "model's context"
            )
        found.append(Prompt(where, ids))
    return found


def _given_ids(item: Any, *, where: str, vocab_size: int) -> np.ndarray:
    expected = f"expected a text, a conversation, a Comparison, or token ids of 0 to {vocab_size - 1}"
    try:
        ids = np.asarray(item)
    except ValueError:
        ids = np.zeros(0)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise DataError(f"{where}: {expected}, found {quote(item)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DataError(f"{where}: {expected}, found the id {ids.min() if ids.min() < 0 else ids.max()}")
    return ids.astype(np.int32)
