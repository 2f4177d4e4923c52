"""Items to score: one response each, as text or token ids. Also builds trees from several items."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.errors import DataError, PrbError
from prb_jax.records.comparison import Comparison, Message, Post
from prb_jax.scoring.paper import with_special_tokens
from prb_jax.text.pair_tokenizer import PairTokenizer
from prb_jax.text.view import View
from prb_jax.trees.tree import TooLongError, Tree

if TYPE_CHECKING:
    from prb_jax.scoring.reader import Reader  # imports jax

NAME = "request"  # name of a request's comparison in messages

MESSAGE = 100
"""Characters that could be tokenised while a chat template renders one message, whatever its length."""


@dataclass(frozen=True)
class ChatItem:
    """A response to a prompt (the conversation before it); user and profile mean the same as in a comparison."""

    prompt: tuple[Message, ...]
    response: str
    user_id: str | None = None
    profile: tuple[Post, ...] = ()
    profile_order: str | None = None


@dataclass(frozen=True)
class RenderedItem:
    """A whole conversation as rendered by the client, text or token ids; its score is read at the last token."""

    content: str | Sequence[int] | np.ndarray
    special_tokens: bool = True  # whether the tokenizer adds its special tokens around a text
    ended: bool = False  # whether a text ends with exactly one end-of-text token of the tokenizer
    # only this many last tokens are read; -1 means the longest conversation that the server accepts
    keep: int | None = None
    user_id: str | None = None


Item = ChatItem | RenderedItem


@dataclass(frozen=True)
class Score:
    """The score of an item, and the number of tokens of its whole conversation; 0 for a scorer that reads no tokens.

    `truncated` is True if prompt or profile was shortened to keep the length limit.
    """

    value: float
    tokens: int
    truncated: bool


Scores = list[Score | PrbError]


class NotFiniteError(DataError):
    """The model's score of a response is not finite."""


@dataclass(frozen=True, eq=False)
class ItemTree:
    """A tree of some items, with the index of the item of each response."""

    members: tuple[int, ...]
    tree: Tree

    def apart(self) -> list[ItemTree]:
        """Return one tree per response."""
        return [self.part([place]) for place in range(len(self.members))]

    def part(self, places: Sequence[int]) -> ItemTree:
        """Return the tree of some of the responses, at these places."""
        responses, read = (
            tuple(whole[place] for place in places) for whole in (self.tree.responses, self.tree.read)
        )
        tree = replace(self.tree, responses=responses, read=read)
        return ItemTree(tuple(self.members[place] for place in places), tree)

    def scores(self, values: np.ndarray) -> Scores:
        """Return the score of each member, from the scores of the tree."""
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

    A tree has at most `most` responses; for an encoder, one.
    """

    reader: Reader
    view: View
    most: int

    def make_trees(
        self, items: Sequence[Item], requests: Sequence[object] | None = None
    ) -> tuple[list[ItemTree], dict[int, PrbError]]:
        """Return trees of the items, and the errors of items without a tree by index.

        Args:
          items: Items of one or several requests.
          requests: Request of each item; None if all belong to one request. The result of an item does not depend on
            items of other requests.
        """
        trees: list[ItemTree] = []
        errors: dict[int, PrbError] = {}
        groups = [
            places[start : start + self.most]
            for places in alike(items)
            for start in range(0, len(places), self.most)
        ]
        while groups:
            smaller: list[list[int]] = []
            made = self._trees([[items[place] for place in places] for places in groups])
            for places, tree in zip(groups, made, strict=True):
                of_requests: dict[object, list[int]] = {}
                for place in places:
                    of_requests.setdefault(requests and requests[place], []).append(place)
                # a prompt is cut to fit the longest response of its tree; another client's must not cause a cut
                if isinstance(tree, Tree) and (len(of_requests) == 1 or not tree.truncation.any):
                    trees.append(ItemTree(tuple(places), tree))
                elif len(of_requests) > 1:
                    smaller += of_requests.values()
                elif not isinstance(tree, Tree) and len(places) == 1:
                    errors[places[0]] = tree
                else:  # not all of them fit one tree, but parts may
                    middle = len(places) // 2
                    smaller += [places[:middle], places[middle:]]
            groups = smaller
        for place, item in enumerate(items):
            if isinstance(item, RenderedItem):
                try:
                    trees.append(ItemTree((place,), self._read_rendered(item)))
                except PrbError as error:
                    errors[place] = error
        if isinstance(self.reader.tokenizer, PairTokenizer):  # an encoder reads each response with its prompt
            trees = [one for made in trees for one in made.apart()]
        return trees, errors

    def _trees(self, groups: Sequence[Sequence[Item]]) -> list[Tree | PrbError]:
        """Return the tree of each group, or its error, in one call of the tokenizer if possible."""
        try:
            for group in groups:
                refuse_rendered(group[0], self.reader.tokenizer.rendered_mark)
            comparisons = [as_comparison(group) for group in groups]
            encoded = self.reader.encode_each(comparisons, view=self.view)
        except PrbError as error:
            return [error] if len(groups) == 1 else [self._trees([group])[0] for group in groups]
        return [self._readable(*pair) for pair in zip(comparisons, encoded, strict=True)]

    def _readable(self, comparison: Comparison, tree: Tree | TooLongError) -> Tree | PrbError:
        """Return the tree with the soft prompt of its user, or the error if the model cannot read the tree."""
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
            ids = with_special_tokens(chat, ids, max_length=None) if item.special_tokens else ids
        else:
            ids = np.asarray(item.content, np.int32)
        if item.keep is not None:
            ids = ids[-(self.reader.limit(self.view) if item.keep < 0 else item.keep) :]
        if not len(ids):
            raise DataError("input: expected at least one token, found an empty text")
        from prb_jax.scoring.token_ids import encode_ids  # imports jax

        return encode_ids(self.reader, [ids], user_id=item.user_id, view=self.view, name="input")


def refuse_rendered(item: Item, mark_in: Callable[[str], str | None]) -> None:
    """Raise DataError for a prompt of one text that the model's chat template has already rendered.

    Args:
      item: Item to check.
      mark_in: Returns the mark of a rendered text, as :meth:`prb_jax.scoring.scorer.Scorer.rendered_mark`.
    """
    if not isinstance(item, ChatItem) or len(item.prompt) != 1 or item.prompt[0].fields:
        return
    if mark := mark_in(item.prompt[0].content):
        raise DataError(
            f"prompt: holds {mark!r}, so this model's chat template has rendered it already, and it would be wrapped "
            "as a user's message again: give messages, or the plain question"
        )


class _Numbers:
    """Gives equal values the same number. An object that occurs many times is hashed once."""

    def __init__(self) -> None:
        self._of_object: dict[int, int] = {}
        self._of_value: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        if id(value) not in self._of_object:
            self._of_object[id(value)] = self._of_value.setdefault(value, len(self._of_value))
        return self._of_object[id(value)]


def alike(items: Sequence[Item]) -> list[list[int]]:
    """Return indices of chat items, grouped by prompt, user and profile."""
    number, together = _Numbers(), dict[object, list[int]]()
    for place, item in enumerate(items):
        if isinstance(item, ChatItem):
            key = number(item.prompt), item.user_id, number(item.profile), item.profile_order
            together.setdefault(key, []).append(place)
    return list(together.values())


@dataclass(frozen=True)
class Piece:
    """Some items of a request that are read together, and their approximate characters."""

    places: list[int]
    characters: int


def pieces(items: Sequence[Item], *, most: int, characters: int) -> list[Piece]:
    """Divide the items of a request into pieces of about `characters` characters.

    Responses that may become one tree stay together, up to `most` of them.
    """
    groups = [
        places[start : start + most] for places in alike(items) for start in range(0, len(places), most)
    ]
    groups += [[place] for place, item in enumerate(items) if isinstance(item, RenderedItem)]
    sizes = dict[int, int]()
    divided, places, size = list[Piece](), list[int](), 0
    for group in groups:
        cost = sum(_cost(items[place]) for place in group)
        first = items[group[0]]
        for part in (first.prompt, first.profile) if isinstance(first, ChatItem) else ():
            if id(part) not in sizes:
                sizes[id(part)] = sum(map(part_characters, part))
            cost += sizes[id(part)]
        if places and size + cost > characters:
            divided.append(Piece(places, size))
            places, size = [], 0
        places, size = places + group, size + cost
    return [*divided, Piece(places, size)]


def _cost(item: Item) -> int:
    """Return the cost of reading an item, in characters, without the texts that it shares with other items."""
    if isinstance(item, ChatItem):
        return len(item.response) + MESSAGE * (len(item.prompt) + 1)
    return len(item.content) + MESSAGE


def part_characters(part: Message | Post) -> int:
    """Return the characters of a message, or of the shown parts of a post."""
    if isinstance(part, Message):
        return len(part.content) + len(part.context)
    return len(part.text) + len(part.category)


def numbered(error: PrbError, place: int, count: int) -> PrbError:
    """Return the error of one response; it names the response if the request has several."""
    if count > 1:
        error.args = (f"response {place}: {error}",)
    return error


def as_comparison(items: Sequence[Item], *, name: str = NAME) -> Comparison:
    """Return a comparison of responses to one prompt, to read the prompt only once."""
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
