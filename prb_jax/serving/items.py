"""What is scored, one response each, as text or as token ids; and how several of them become trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.data.comparison import Comparison, Message, Post
from prb_jax.errors import DataError, PrbError
from prb_jax.text.pair_tokenizer import PairTokenizer
from prb_jax.text.view import View
from prb_jax.text.visible import TextProtocol
from prb_jax.trees.shorten import TooLongError
from prb_jax.trees.tree import Tree

if TYPE_CHECKING:
    from prb_jax.scoring.reader import Reader  # which imports jax

NAME = "request"  # what messages about a comparison of a request call it

CHARACTERS = 16
"""Characters for each token of the limit that a text of a client may have: more are refused and not tokenised."""

LEAST_CHARACTERS = 100_000
"""So many may a prompt, a profile, or another text that is cut to fit have in any case."""


@dataclass(frozen=True)
class ChatItem:
    """A response to a prompt, the conversation before it; user and profile are as of a comparison."""

    prompt: tuple[Message, ...]
    response: str
    user_id: str | None = None
    profile: tuple[Post, ...] = ()
    profile_order: str | None = None

    @property
    def same_prompt(self) -> object:
        """Equal for responses to one prompt, for one user with one profile."""
        return self.prompt, self.user_id, self.profile, self.profile_order


@dataclass(frozen=True)
class RenderedItem:
    """A whole conversation as the client rendered it, text or token ids, read at its last token."""

    content: str | tuple[int, ...]
    special_tokens: bool = True  # whether the tokenizer adds its special tokens around a text
    ended: bool = False  # whether the tokenizer's end-of-text token is put behind a text, once
    # only the last so many tokens are read; -1 for the longest conversation that the server takes
    keep: int | None = None
    user_id: str | None = None


Item = ChatItem | RenderedItem


@dataclass(frozen=True)
class Score:
    """The score of an item, and the tokens of its whole conversation.

    It is truncated where something of prompt or profile was left out to keep the length limit.
    """

    value: float
    tokens: int
    truncated: bool


Scores = list[Score | PrbError]


class NotFiniteError(DataError):
    """The model gives no finite number for a response."""


class TooManyCharactersError(DataError):
    """A text of a client that is too long to be tokenised."""


@dataclass(frozen=True, eq=False)
class ItemTree:
    """A tree of some of the items, with the place of the item of each response."""

    members: tuple[int, ...]
    tree: Tree

    def apart(self) -> list[ItemTree]:
        """Return a tree of each response alone."""
        parts = zip(self.members, self.tree.responses, self.tree.read, strict=True)
        return [
            ItemTree((member,), replace(self.tree, responses=(response,), read=(read,)))
            for member, response, read in parts
        ]

    def scores(self, values: np.ndarray) -> Scores:
        """Return the score of each member, from those of the tree."""
        prefix, cut = len(self.tree.prefix), self.tree.truncation.any
        return [
            Score(value, prefix + len(response), cut)
            if np.isfinite(value)
            else NotFiniteError(f"the model's score is {value}, which is not a finite number")
            for value, response in zip(values.tolist(), self.tree.responses, strict=True)
        ]


@dataclass(frozen=True)
class TreeMaker:
    """Makes trees of items: responses to one prompt, for one user with one profile, become one tree.

    A tree has `most` responses at most, and for an encoder one.
    """

    reader: Reader
    view: View
    most: int

    def check_sizes(self, items: Sequence[Item]) -> None:
        """Refuse texts of which tokenising alone would take long.

        Raises:
          TooManyCharactersError: naming the text, its characters, and how many it may have.
        """
        limit = self.reader.limit(self.view)
        least = CHARACTERS * limit
        of_cut = max(least, LEAST_CHARACTERS)  # what is cut to fit may be longer
        of_response = of_cut if self.view.protocol is TextProtocol.PAPER else least
        for number, item in enumerate(items):
            if isinstance(item, ChatItem):
                posts = item.profile[: self.view.profile_posts]
                lengths = {
                    "response": (len(item.response), of_response),
                    "prompt": (sum(len(message.content) for message in item.prompt), of_cut),
                    "profile": (sum(len(post.text) for post in posts), of_cut),
                }
            else:
                size = len(item.content) if isinstance(item.content, str) else 0
                lengths = {"input": (size, least if item.keep is None else of_cut)}
            for name, (found, most) in lengths.items():
                if found > most:
                    raise TooManyCharactersError(
                        f"response {number}: its {name} has {found:,} characters; at most {most:,} are read where a "
                        f"conversation has at most {limit:,} tokens"
                    )

    def make_trees(self, items: Sequence[Item]) -> tuple[list[ItemTree], dict[int, PrbError]]:
        """Return trees of the items, and by place why an item has none.

        What becomes of an item does not depend on the others.
        """
        trees: list[ItemTree] = []
        errors: dict[int, PrbError] = {}
        together: dict[object, list[int]] = {}
        for place, item in enumerate(items):
            if isinstance(item, ChatItem):
                together.setdefault(item.same_prompt, []).append(place)
        groups = [
            places[start : start + self.most]
            for places in together.values()
            for start in range(0, len(places), self.most)
        ]
        while groups:
            alone: list[list[int]] = []
            made = self._trees([[items[place] for place in places] for places in groups])
            for places, tree in zip(groups, made, strict=True):
                if isinstance(tree, Tree):
                    trees.append(ItemTree(tuple(places), tree))
                elif len(places) == 1:
                    errors[places[0]] = tree
                else:  # they have no tree together, though some of them may have one alone
                    alone += [[place] for place in places]
            groups = alone
        for place, item in enumerate(items):
            if isinstance(item, RenderedItem):
                try:
                    trees.append(ItemTree((place,), self._read_rendered(item)))
                except PrbError as error:
                    errors[place] = error
        if isinstance(self.reader.tokenizer, PairTokenizer):  # each response is computed with its prompt
            trees = [one for made in trees for one in made.apart()]
        return trees, errors

    def _trees(self, groups: Sequence[Sequence[Item]]) -> list[Tree | PrbError]:
        """The tree of each group, or why it has none, in one call of the tokenizer if that is possible."""
        try:
            comparisons = [as_comparison(group) for group in groups]
            encoded = self.reader.encode_each(comparisons, view=self.view)
        except PrbError as error:
            return [error] if len(groups) == 1 else [self._trees([group])[0] for group in groups]
        return [self._readable(*pair) for pair in zip(comparisons, encoded, strict=True)]

    def _readable(self, comparison: Comparison, tree: Tree | TooLongError) -> Tree | PrbError:
        """A tree with the soft prompt of its user, or why the model cannot read it."""
        if isinstance(tree, TooLongError):
            return tree
        prompts = self.reader.prompts
        try:
            self.reader.check_readable(f"comparison '{NAME}'", tree)
            return tree if prompts is None else prompts.encode([tree], [comparison])[0]
        except PrbError as error:
            return error

    def _read_rendered(self, item: RenderedItem) -> Tree:
        if isinstance(item.content, str):
            chat, text = self.reader.tokenizer, item.content
            if isinstance(chat, PairTokenizer):
                raise DataError(
                    "input: this model reads a prompt and a response as two texts: send messages, or a query and "
                    "documents"
                )
            if item.ended:
                text = ended_once(text, eos=chat.tokenizer.eos_token, pad=chat.tokenizer.pad_token)
            ids = chat.tokenize([text])[0]
            ids = chat.with_special_tokens(ids, max_length=None) if item.special_tokens else ids
        else:
            ids = np.asarray(item.content, np.int32)
        if item.keep is not None:
            ids = ids[-(self.reader.limit(self.view) if item.keep < 0 else item.keep) :]
        if not len(ids):
            raise DataError("input: expected at least one token, found an empty text")
        return self.reader.encode_ids([ids], user_id=item.user_id, view=self.view, name="input")


def as_comparison(items: Sequence[Item], *, name: str = NAME) -> Comparison:
    """Return a comparison of responses to one prompt, so that the prompt is read once."""
    chats = [item for item in items if isinstance(item, ChatItem)]
    first = chats[0]
    return Comparison(
        id=name,
        prompt=first.prompt,
        responses=[item.response for item in chats],
        user_id=first.user_id,
        profile=first.profile,
        profile_order=first.profile_order,
    )


def ended_once(text: str, *, eos: str | None, pad: str | None) -> str:
    """The text without padding and end-of-text tokens around it, and with one of the latter behind it."""
    marks = sorted({mark for mark in (pad, eos) if mark}, key=len, reverse=True)
    start, end = 0, len(text)  # the text itself is copied once, however many marks there are
    while mark := next((mark for mark in marks if text.startswith(mark, start, end)), None):
        start += len(mark)
    while mark := next((mark for mark in marks if text.endswith(mark, start, end)), None):
        end -= len(mark)
    return text[start:end] + (eos or "")
