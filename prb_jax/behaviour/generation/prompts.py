"""Prompts of a policy: comparisons, conversations or texts become token ids, with as many posts as fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from prb_jax.errors import DataError, quote, short_repr
from prb_jax.records.comparison import Comparison, Message
from prb_jax.scoring.token_ids import IdsTooLongError
from prb_jax.text.prompts import encode_prompts
from prb_jax.text.tokenizer import ChatTokenizer, RenderError
from prb_jax.text.view import OrderClaim, TextProtocol, visible

Fitting = TypeVar("Fitting")

TOGETHER = 64
"""Prompts to tokenise in one call."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenised text for a policy to continue."""

    name: str  # for messages: id of the comparison, or position
    ids: np.ndarray  # int32 [p], at least one
    posts_dropped: int = 0  # posts of the profile that did not fit

    __repr__ = short_repr


def comparison_prompts(
    comparisons: Sequence[Comparison],
    chat: ChatTokenizer,
    *,
    profile_posts: int,
    limit: int,
    order_claim: OrderClaim = OrderClaim.RECORDED,
) -> list[Prompt]:
    """Return the prompts of comparisons: the first posts of the profile, then the question.

    If a prompt is too long, whole posts are dropped from the end of the profile, and counted.

    Args:
      comparisons: Comparisons to read; responses are ignored.
      chat: Tokenizer and chat template.
      profile_posts: Maximum number of posts to show.
      limit: Maximum tokens of a prompt.
      order_claim: Statement of the prompt about the order of the posts.

    Raises:
      DataError: a prompt is too long even without posts, or the template rejects it; names the comparison.
    """

    def encode(part: Sequence[Comparison], posts: int) -> list[np.ndarray]:
        shown = [
            visible(one, profile_posts=posts, protocol=TextProtocol.DEFAULT, order_claim=order_claim)
            for one in part
        ]
        try:
            return encode_prompts(chat, [one.prefix_messages for one in shown])
        except RenderError as error:
            raise DataError(f"comparison {quote(part[error.conversation].id)}: {error.reason}") from error

    prompts: list[Prompt] = []
    for start in range(0, len(comparisons), TOGETHER):
        part = comparisons[start : start + TOGETHER]
        for comparison, with_all in zip(part, encode(part, profile_posts), strict=True):

            def read(
                posts: int, comparison: Comparison = comparison, ids: np.ndarray = with_all
            ) -> np.ndarray:
                if posts < min(len(comparison.profile), profile_posts):
                    (ids,) = encode([comparison], posts)
                if len(ids) > limit:
                    raise IdsTooLongError(
                        f"comparison {quote(comparison.id)}: its prompt has {len(ids)} tokens without profile; "
                        f"expected at most {limit}, to leave room for the new tokens in the model's context"
                    )
                return ids

            prompts.append(Prompt(comparison.id, *fit_posts(comparison, profile_posts, read)))
    return prompts


def fit_posts(
    comparison: Comparison, profile_posts: int, read: Callable[[int], Fitting]
) -> tuple[Fitting, int]:
    """Return the result of ``read`` for as many posts of a profile as fit, and the number of dropped posts.

    Args:
      comparison: Comparison with the profile.
      profile_posts: Maximum number of posts to show.
      read: Builds the text with a number of first posts; raises IdsTooLongError if it does not fit.

    Raises:
      IdsTooLongError: the text does not fit even without posts.
      DataError: the chat template rejects the text; names the comparison.
    """
    most = min(len(comparison.profile), profile_posts)
    try:
        try:
            return read(most), 0
        except IdsTooLongError:
            if not most:
                raise
        fitting, fits, too_many = read(0), 0, most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            try:
                fitting, fits = read(middle), middle
            except IdsTooLongError:
                too_many = middle
        return fitting, most - fits
    except RenderError as error:
        raise DataError(f"comparison {quote(comparison.id)}: {error.reason}") from error


def given_prompts(
    data: Sequence[Any], chat: ChatTokenizer, *, profile_posts: int, limit: int, vocab_size: int
) -> list[Prompt]:
    """Return the prompts that a Python caller gave.

    Args:
      data: Comparisons; texts (a user's message each); conversations, lists of {role, content}; or token ids.
      chat, profile_posts, limit: Same as for :func:`comparison_prompts`.
      vocab_size: Exclusive upper bound of the ids.

    Raises:
      DataError: an item has another type, or a prompt is too long; names the position.
    """
    prompts: list[Prompt] = []
    for position, item in enumerate(data):
        where, comparison = f"prompt {position}", item
        if isinstance(item, Sequence) and item and all(isinstance(part, Mapping) for part in item):
            comparison = Comparison(id=where, prompt=item, responses=["-"])
            if comparison.responses != ("-",):
                raise DataError(f"{where}: ends with the beginning of an answer, which would be left out")
        if isinstance(comparison, Comparison):
            prompts += comparison_prompts([comparison], chat, profile_posts=profile_posts, limit=limit)
            continue
        if isinstance(item, str):
            (ids,) = encode_prompts(chat, [[Message("user", item)]])
        else:
            ids = _given_ids(item, where=where, vocab_size=vocab_size)
        if len(ids) > limit:
            raise DataError(
                f"{where}: has {len(ids)} tokens; expected at most {limit}, so that the new tokens fit into the "
                "model's context"
            )
        prompts.append(Prompt(where, ids))
    return prompts


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
