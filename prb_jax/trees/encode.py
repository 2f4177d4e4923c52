"""From comparisons to trees: what is visible, cut to fit the length limit, in token ids.

The limit holds for each whole conversation (prompt and one response), as if it were scored alone.
In the default protocol, what does not fit is taken away in this order, and counted:

1. whole posts from the end of the ranked profile, as few as possible;
2. whole earlier turns of the prompt, the oldest first (`prb_jax.trees.shorten`);
3. the start of the question, or of the system message if that is longer, word by word: what
   stands last in a prompt is what a response answers to.

A response is never cut, and the conversation stays a valid rendering of the chat template. The
`paper` protocol instead cuts the end of each conversation, response first (`prb_jax.trees.paper`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import Message, turns_of
from prb_jax.seams import get
from prb_jax.text.tokenizer import RenderError
from prb_jax.text.view import View
from prb_jax.text.visible import TextProtocol, Visible, render_profile, visible
from prb_jax.trees.tree import Tree, Truncation, build_tree

if TYPE_CHECKING:
    from prb_jax.text.pair_tokenizer import PairTokenizer
    from prb_jax.text.tokenizer import ChatTokenizer


class TooLongError(DataError):
    """A response that leaves no room for its prompt within the length limit.

    Attributes:
      comparison: which one.
      tokens: of its longest conversation, without profile.
      limit: the most tokens that a conversation may have.
    """

    def __init__(self, comparison: Comparison, *, tokens: int, responses: Sequence[int], limit: int) -> None:
        self.comparison, self.tokens, self.limit = comparison, tokens, limit
        super().__init__(
            f"comparison {quote(comparison.id)}: its longest conversation has {tokens} tokens without profile and the"
            f" responses alone {min(responses)} to {max(responses)}; with the chat template that leaves no room for"
            f" the prompt within max_length {limit}, and responses are never cut"
        )


CHUNK_ROWS = 64
"""Comparisons tokenised in one call: enough to keep the tokenizer's threads busy, few enough that
its bulky intermediate results stay small."""

ESTIMATE_SLACK = 8  # by how many tokens leaving out one post may differ from the length of that post alone


def encode_comparisons(
    comparisons: Sequence[Comparison],
    tokenizer: ChatTokenizer | PairTokenizer,
    *,
    view: View,
    pad_token_id: int | None = None,
) -> list[Tree]:
    """The trees of `comparisons`, in their order. Each is a function of its comparison alone.

    Args:
      view: what is shown; without a length limit of its own that of the protocol counts (none for default, 8,192
        for paper).
      pad_token_id: padding id in the model's configuration, which the paper protocol's read
        position depends on; the tokenizer's when not given. Without either, the last token is read.

    Raises:
      DataError: naming the comparison: the template refuses it, a response with its template
        exceeds the limit (`TooLongError`), or two different responses have become equal in tokens (the
        last two not in the paper protocol).
    """
    trees: list[Tree] = []
    for tree in encode_each(comparisons, tokenizer, view=view, pad_token_id=pad_token_id):
        if isinstance(tree, TooLongError):
            raise tree
        trees.append(tree)
    return trees


def encode_each(
    comparisons: Sequence[Comparison],
    tokenizer: ChatTokenizer | PairTokenizer,
    *,
    view: View,
    pad_token_id: int | None = None,
) -> Iterator[Tree | TooLongError]:
    """As `encode_comparisons`, one after another, with the error of each comparison that is too long in its place.

    Raises:
      DataError: as `encode_comparisons`, but for comparisons that are too long.
    """
    encoder = Encoder(tokenizer, view, view.max_length or view.protocol.max_length)
    for start in range(0, len(comparisons), CHUNK_ROWS):
        chunk = comparisons[start : start + CHUNK_ROWS]
        if view.protocol is TextProtocol.PAPER:
            yield from get("protocols", "paper").value(encoder, chunk, pad_token_id)
        else:
            yield from encoder.default(chunk)


@dataclass(eq=False)
class _Row:
    """A comparison on its way to a length that fits."""

    comparison: Comparison
    posts: int  # posts tried now
    refused: int  # fewest posts known to be too many
    fitting: int = -1  # most posts known to fit; -1 while not even none is known to
    sequences: list[np.ndarray] = field(default_factory=list)
    """Ids of the K conversations with `fitting` posts; with none, where not even that is known to fit."""
    block_tokens: list[int] = field(default_factory=list)
    """Length of each post alone; known for rows that do not fit with all their posts."""


@dataclass(frozen=True)
class Encoder:
    """From comparisons to trees of one view, by one tokenizer."""

    tokenizer: ChatTokenizer | PairTokenizer
    view: View
    limit: int | None

    def default(self, comparisons: Sequence[Comparison]) -> list[Tree | TooLongError]:
        shown = [min(len(comparison.profile), self.view.profile_posts) for comparison in comparisons]
        rows = [
            _Row(comparison, posts=posts, refused=posts + 1)
            for comparison, posts in zip(comparisons, shown, strict=True)
        ]
        active = rows
        while active:
            seen = [self.visible(row.comparison, row.posts) for row in active]
            encoded = self.encode([row.comparison for row in active], seen)
            refused: list[_Row] = []
            for row, sequences in zip(active, encoded, strict=True):
                if self.limit is None or longest(sequences) <= self.limit:
                    row.fitting, row.sequences = row.posts, sequences
                else:
                    row.refused = row.posts
                    refused.append(row)
                    if row.posts == 0:
                        row.sequences = sequences
            self._count_blocks(refused)
            active = [
                row
                for row, sequences in zip(active, encoded, strict=True)
                if self._choose_posts(row, longest(sequences))
            ]
        return [self._finish(row, posts) for row, posts in zip(rows, shown, strict=True)]

    def visible(self, comparison: Comparison, posts: int) -> Visible:
        """Return what is visible of a comparison with so many posts."""
        return visible(
            comparison, profile_posts=posts, protocol=self.view.protocol, order_claim=self.view.order_claim
        )

    def encode(self, comparisons: Sequence[Comparison], seen: Sequence[Visible]) -> list[list[np.ndarray]]:
        """Return the ids of the K conversations of each comparison; DataError where the template refuses one."""
        groups = [conversations(shown.prefix_messages, shown.responses) for shown in seen]
        try:
            return self.tokenizer.encode_together(groups)
        except RenderError as error:
            number = error.conversation
            for comparison, group in zip(comparisons, groups, strict=True):
                if number < len(group):
                    raise DataError(f"comparison {quote(comparison.id)}: {error.reason}") from error
                number -= len(group)
            raise

    def _count_blocks(self, rows: Sequence[_Row]) -> None:
        """Fills in the length of each post, for rows that need it and lack it."""
        rows = [row for row in rows if not row.block_tokens]
        texts = [
            render_profile([post], 1, protocol=self.view.protocol) + "\n"
            for row in rows
            for post in row.comparison.profile[: row.refused]
        ]
        lengths = iter([len(ids) for ids in self.tokenizer.tokenize(texts)])
        for row in rows:
            row.block_tokens = [next(lengths) for _ in row.comparison.profile[: row.refused]]

    def _choose_posts(self, row: _Row, length: int) -> bool:
        """Chooses the next number of posts to try, given the `length` found with the last; False when settled.

        Lengths of posts alone predict the length of the whole to within a few tokens, so two or
        three tries find the largest number that fits.
        """
        if self.limit is None or row.refused - row.fitting <= 1:
            return False
        guess = row.posts
        if row.fitting == row.posts:
            guess += 1
            if length + row.block_tokens[row.posts] > self.limit + ESTIMATE_SLACK:
                return False
        else:
            while guess > 0 and length > self.limit:
                guess -= 1
                length -= row.block_tokens[guess]
        row.posts = min(max(guess, row.fitting + 1), row.refused - 1)
        return True

    def _finish(self, row: _Row, shown: int) -> Tree | TooLongError:
        dropped = 0
        if row.fitting < 0:
            assert self.limit is not None
            row.fitting = 0
            shorten = get("protocols", "shorten").value
            shortened = shorten(self, row.comparison, row.sequences, self.limit)
            if isinstance(shortened, TooLongError):
                return shortened
            row.sequences, dropped = shortened
        truncation = Truncation(posts_dropped=shown - row.fitting, prompt_tokens_dropped=dropped)
        tree = build_tree(row.sequences, truncation=truncation)
        refuse_merged_responses(row.comparison, tree)
        return tree


def conversations(messages: Sequence[Message], responses: Sequence[str]) -> list[list[Message]]:
    """The K whole conversations: the prompt, answered by each response."""
    return [[*messages, *turns_of(response)] for response in responses]


def longest(sequences: Sequence[np.ndarray]) -> int:
    """Length of the longest sequence."""
    return max(len(sequence) for sequence in sequences)


def refuse_merged_responses(comparison: Comparison, tree: Tree) -> None:
    """Raises DataError if two responses that read differently have the same tokens.

    Differences that many templates and tokenizers leave out on purpose (surrounding blanks, the form of a Unicode
    character, thoughts in front of `</think>`) are none: such responses tie, as equal ones do, and are counted.
    """
    first: dict[bytes, int] = {}
    for k, ids in enumerate(tree.responses):
        other = first.setdefault(ids.tobytes(), k)
        if other == k:
            continue
        a, b = comparison.responses[other], comparison.responses[k]
        if a != b and _plain(a) != _plain(b):
            raise DataError(
                f"comparison {quote(comparison.id)}: responses[{other}] and responses[{k}] differ as text but have the"
                " same tokens; the chat template or the tokenizer drops what tells them apart"
            )


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text.rpartition("</think>")[2]).split())
