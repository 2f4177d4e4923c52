"""Turn comparisons into trees: the visible parts in token ids, cut to the length limit.

The limit holds for each whole conversation (prompt and one response), as if it were scored alone. The default protocol
removes text in this order until the conversation fits, and counts it:

1. whole posts from the end of the ranked profile, as few as possible;
2. whole earlier turns of the prompt, the oldest first (`prb_jax.trees.shorten`);
3. the start of the question, or of the system message if that is longer, word by word, because a response answers the
   end of a prompt.

A response is never cut, and the conversation stays a valid rendering of the chat template. The
`paper` protocol instead cuts the end of each conversation, response first (`prb_jax.trees.paper`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
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
      comparison: The comparison.
      tokens: Length of its longest conversation, without profile.
      limit: Maximum number of tokens of a conversation.
    """

    def __init__(self, comparison: Comparison, *, tokens: int, responses: Sequence[int], limit: int) -> None:
        self.comparison, self.tokens, self.limit = comparison, tokens, limit
        super().__init__(
            f"comparison {quote(comparison.id)}: its longest conversation has {tokens} tokens without profile and the"
            f" responses alone {min(responses)} to {max(responses)}; with the chat template that leaves no room for"
            f" the prompt within max_length {limit}, and responses are never cut"
        )


CHUNK_ROWS = 64
"""Comparisons tokenised in one call: enough to keep the tokenizer's threads busy, few enough to keep its intermediate
results small."""

ESTIMATE_SLACK = 8  # maximum error in tokens of estimates from lengths of single texts


def encode_comparisons(
    comparisons: Sequence[Comparison],
    tokenizer: ChatTokenizer | PairTokenizer,
    *,
    view: View,
    pad_token_id: int | None = None,
) -> list[Tree]:
    """Return the trees of `comparisons`, in their order. Each depends only on its comparison.

    Args:
      comparisons: Comparisons to encode.
      tokenizer: Tokenizer of the model.
      view: View of the model. If it has no length limit, the protocol's limit counts (none for default, 8,192 for
        paper).
      pad_token_id: Padding id of the model's configuration, for the read position of the paper protocol; the
        tokenizer's if not given. Without either, the last token is read.

    Raises:
      DataError: The template refuses a comparison, a response leaves no room for its prompt (`TooLongError`), or two
        different responses have the same tokens (the last two not in the paper protocol). The message names the
        comparison.
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
    """Yield the trees of `encode_comparisons` one by one, or the error of a comparison that is too long in its place.

    Raises:
      DataError: Errors of `encode_comparisons`, except `TooLongError`.
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
    """State of the search for the number of posts of a comparison that does not fit with all."""

    comparison: Comparison
    posts: int  # number of posts tried
    refused: int = 0  # smallest number known to be too large
    fitting: int = -1  # largest number known to fit; -1 if 0 is not known to fit
    sequences: list[np.ndarray] = field(default_factory=list)
    """Ids of the K conversations with `fitting` posts; without posts if `fitting` is -1."""
    block_tokens: list[int] = field(default_factory=list)  # length of each post by itself


@dataclass(frozen=True)
class Encoder:
    """Turns comparisons into trees, for one tokenizer and one view."""

    tokenizer: ChatTokenizer | PairTokenizer
    view: View
    limit: int | None

    def default(self, comparisons: Sequence[Comparison]) -> list[Tree | TooLongError]:
        """Return the trees of comparisons in the default protocol, with as many posts as fit."""
        shown = [min(len(comparison.profile), self.view.profile_posts) for comparison in comparisons]
        encoded = self.encode(comparisons, map(self.visible, comparisons, shown))
        long = {
            place: _Row(comparison, posts)
            for place, (comparison, posts) in enumerate(zip(comparisons, shown, strict=True))
            if not self.fits(encoded[place])
        }
        self._search(list(long.values()), [encoded[place] for place in long])
        return [
            self._shortened(long[place], shown[place])
            if place in long
            else self._tree(comparison, encoded[place])
            for place, comparison in enumerate(comparisons)
        ]

    def fits(self, sequences: Sequence[np.ndarray]) -> bool:
        """Return True if each conversation of a comparison is within the limit."""
        return self.limit is None or longest(sequences) <= self.limit

    def visible(self, comparison: Comparison, posts: int) -> Visible:
        """Return the visible parts of a comparison with `posts` posts."""
        return visible(
            comparison, profile_posts=posts, protocol=self.view.protocol, order_claim=self.view.order_claim
        )

    def encode(self, comparisons: Sequence[Comparison], seen: Iterable[Visible]) -> list[list[np.ndarray]]:
        """Return the ids of the K conversations of each comparison; DataError if the template refuses one."""
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

    def _search(self, rows: Sequence[_Row], tried: Sequence[list[np.ndarray]]) -> None:
        """Find the largest number of posts that fits, for each row; `tried` are the ids with `posts` posts."""
        while rows:
            refused: list[_Row] = []
            for row, sequences in zip(rows, tried, strict=True):
                if self.fits(sequences):
                    row.fitting, row.sequences = row.posts, sequences
                else:
                    row.refused = row.posts
                    refused.append(row)
                    if row.posts == 0:
                        row.sequences = sequences
            self._count_blocks(refused)
            rows = [
                row
                for row, sequences in zip(rows, tried, strict=True)
                if self._choose_posts(row, longest(sequences))
            ]
            if rows:
                comparisons = [row.comparison for row in rows]
                tried = self.encode(comparisons, [self.visible(row.comparison, row.posts) for row in rows])

    def _count_blocks(self, rows: Sequence[_Row]) -> None:
        """Set the length of each post for rows without lengths."""
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
        """Choose the next number of posts to try from the `length` of the last try; return False when done.

        Lengths of single posts predict the total length to within a few tokens, so two or three tries find the largest
        number that fits.
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

    def _shortened(self, row: _Row, shown: int) -> Tree | TooLongError:
        """Return the tree of a comparison with fewer posts than `shown`, and with a shorter prompt if none fits."""
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
        return self._tree(row.comparison, row.sequences, truncation)

    def _tree(
        self, comparison: Comparison, sequences: Sequence[np.ndarray], truncation: Truncation | None = None
    ) -> Tree:
        tree = build_tree(sequences, truncation=truncation)
        refuse_merged_responses(comparison, tree)
        return tree


def conversations(messages: Sequence[Message], responses: Sequence[str]) -> list[list[Message]]:
    """Return the K whole conversations: the prompt followed by each response."""
    return [[*messages, *turns_of(response)] for response in responses]


def longest(sequences: Sequence[np.ndarray]) -> int:
    """Return the length of the longest sequence."""
    return max(len(sequence) for sequence in sequences)


def refuse_merged_responses(comparison: Comparison, tree: Tree) -> None:
    """Raise DataError if two different responses have the same tokens.

    Many templates and tokenizers drop some differences on purpose: surrounding blanks, the form of a Unicode character,
    or thoughts before `</think>`. Such responses count as equal: they tie, and are counted.
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
                " same tokens; the chat template or the tokenizer drops the difference"
            )


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text.rpartition("</think>")[2]).split())
