"""What is scored, one response each, as text or as token ids; and how several of them become trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.data.comparison import Comparison, Message, Post
from prb_jax.errors import DataError, PrbError
from prb_jax.scoring.reader import Reader
from prb_jax.text.pair_tokenizer import PairTokenizer
from prb_jax.text.view import View
from prb_jax.trees.tree import Tree

NAME = "request"
"""What messages about a comparison of a request call it."""

MOST_RESPONSES = 64
"""Responses of a tree, at most: more of one prompt become several trees, which share their beginning."""


@dataclass(frozen=True)
class Texts:
    """A response to a prompt.

    Attributes:
      prompt: the conversation before the response.
      response: its text.
      user_id, profile, profile_order: as of a comparison.
    """

    prompt: tuple[Message, ...]
    response: str
    user_id: str | None = None
    profile: tuple[Post, ...] = ()
    profile_order: str | None = None


@dataclass(frozen=True)
class Whole:
    """A whole conversation as the client rendered it, read at its last token.

    Attributes:
      content: its text or its token ids.
      special_tokens: whether the tokenizer adds its special tokens around a text.
      ended: whether the tokenizer's end-of-text token is put behind a text, once.
      keep: only the last so many tokens are read; -1 for the longest conversation that the server takes.
      user_id: as of a comparison.
    """

    content: str | tuple[int, ...]
    special_tokens: bool = True
    ended: bool = False
    keep: int | None = None
    user_id: str | None = None


Item = Texts | Whole


@dataclass(frozen=True)
class Score:
    """The score of an item.

    Attributes:
      value: as the model gives it.
      tokens: of the whole conversation.
      truncated: whether something of prompt or profile was left out to keep the length limit.
    """

    value: float
    tokens: int
    truncated: bool


class NotFiniteError(DataError):
    """The model gives no finite number for a response."""


@dataclass(frozen=True, eq=False)
class Grown:
    """A tree of some of the items.

    Attributes:
      members: the place of the item of each response.
      tree: in tokens.
    """

    members: tuple[int, ...]
    tree: Tree

    def scores(self, values: np.ndarray) -> list[Score | PrbError]:
        """Return the score of each member, from those of the tree."""
        found: list[Score | PrbError] = []
        for value, response in zip(values.tolist(), self.tree.responses, strict=True):
            if not np.isfinite(value):
                found.append(NotFiniteError(f"the model's score is {value}, which is not a finite number"))
                continue
            tokens = len(self.tree.prefix) + len(response)
            found.append(Score(value, tokens, self.tree.truncation.any))
        return found


@dataclass(frozen=True)
class Grower:
    """Makes trees of items: responses to one prompt, for one user with one profile, become one tree.

    Attributes:
      reader: of the model.
      view: what it is shown.
      most: responses of a tree.
    """

    reader: Reader
    view: View
    most: int

    def grow(self, items: Sequence[Item]) -> tuple[list[Grown], dict[int, PrbError]]:
        """Return trees of the items, and by place why an item has none.

        What becomes of an item does not depend on the others.
        """
        errors: dict[int, PrbError] = {}
        texts: dict[object, list[int]] = {}
        whole: list[int] = []
        for place, item in enumerate(items):
            if isinstance(item, Texts):
                texts.setdefault((item.prompt, item.user_id, item.profile, item.profile_order), []).append(
                    place
                )
            else:
                whole.append(place)
        groups = [
            places[start : start + self.most]
            for places in texts.values()
            for start in range(0, len(places), self.most)
        ]
        grown = self._together(items, groups, errors) if groups else []
        for place in whole:
            grown += self._tried([place], lambda places: [self._whole(items[places[0]])], errors)
        return grown, errors

    def _together(
        self, items: Sequence[Item], groups: Sequence[list[int]], errors: dict[int, PrbError]
    ) -> list[Grown]:
        """All groups in one call of the tokenizer; one after another where that fails."""

        def encode(groups: Sequence[list[int]]) -> list[Tree]:
            several = [_comparison([items[place] for place in places]) for places in groups]
            return self.reader.encode(several, view=self.view)

        try:
            return [Grown(tuple(p), tree) for p, tree in zip(groups, encode(groups), strict=True)]
        except PrbError:
            return [
                one for group in groups for one in self._tried(group, lambda places: encode([places]), errors)
            ]

    def _tried(
        self, places: list[int], encode: Callable[[list[int]], list[Tree]], errors: dict[int, PrbError]
    ) -> list[Grown]:
        """The tree of a group; one for each item where they have none together."""
        try:
            return [Grown(tuple(places), tree) for tree in encode(places)]
        except PrbError as error:
            if len(places) == 1:
                errors[places[0]] = error
                return []
        return [one for place in places for one in self._tried([place], encode, errors)]

    def _whole(self, item: Item) -> Tree:
        assert isinstance(item, Whole)
        ids = self._tokenised(item) if isinstance(item.content, str) else np.asarray(item.content, np.int32)
        kept = ids
        if item.keep is not None:
            kept = ids[-(self.reader.limit(self.view) if item.keep < 0 else item.keep) :]
        if not len(kept):
            raise DataError("input: expected at least one token, found an empty text")
        return self.reader.encode_ids([kept], user_id=item.user_id, view=self.view, name="input")

    def _tokenised(self, item: Whole) -> np.ndarray:
        chat, text = self.reader.tokenizer, str(item.content)
        if isinstance(chat, PairTokenizer):
            raise DataError(
                "input: this model reads a prompt and a response as two texts: send messages, or a query and documents"
            )
        if item.ended:
            text = _ended(text, eos=chat.tokenizer.eos_token, pad=chat.tokenizer.pad_token)
        ids = chat.tokenize([text])[0]
        return chat.with_special_tokens(ids, max_length=None) if item.special_tokens else ids


def _comparison(items: Sequence[Item]) -> Comparison:
    """Responses to one prompt, so that the prompt is read once."""
    texts = [item for item in items if isinstance(item, Texts)]
    first = texts[0]
    return Comparison(
        id=NAME,
        prompt=first.prompt,
        responses=[each.response for each in texts],
        user_id=first.user_id,
        profile=first.profile,
        profile_order=first.profile_order,
    )


def _ended(text: str, *, eos: str | None, pad: str | None) -> str:
    """The text without padding and end-of-text tokens around it, and with one of the latter behind it."""
    marks = tuple({mark for mark in (pad, eos) if mark})
    while mark := next((mark for mark in marks if text.startswith(mark)), None):
        text = text.removeprefix(mark)
    while mark := next((mark for mark in marks if text.endswith(mark)), None):
        text = text.removesuffix(mark)
    return text + (eos or "")
