"""A tree: the tokens of one shared prefix and of K responses that continue it.

The split is made in token space. Each full conversation (prompt and response) is tokenised separately; the prefix is
the longest common run of ids of the K sequences. So a tree's scores equal the scores of K separate forward passes, for
any text that the chat template writes around a response and any merges of the tokenizer at its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from prb_jax.errors import DataError, counted, quote, short_repr

if TYPE_CHECKING:
    from prb_jax.records.comparison import Comparison

EQUAL_SIDES: Final = "equal_after_template"  # entry of a summary or record with `EqualSides`
NAMED: Final = 10  # maximum number of listed comparisons with equal sides

BLOCK = 128
"""Tokens of a block of queries, and of a block of keys: the work on two such blocks fits the caches of a core."""

CHUNK = 64
"""Maximum tokens of a chunk of a recurrent layer: longer chunks need fewer steps but more products per step."""

LEAST_SHARED = 48
"""Shorter common prefixes (e.g. the opening of a chat template) are not worth a separate block of attention."""


def round_up(size: int, multiple: int) -> int:
    """Round a size up to a multiple."""
    return -(-size // multiple) * multiple


Skip = Callable[[Sequence[int]], bool]
"""Returns True if all scores of a batch of these indices are known, so the batch is not computed."""


def skip_nothing(indices: Sequence[int]) -> bool:
    """Return False: every batch needs scores."""
    return False


@dataclass(frozen=True)
class Truncation:
    """Amounts of text cut from one comparison to fit its length limit."""

    posts_dropped: int = 0  # number of whole profile posts, from the end of the ranked profile
    prompt_tokens_dropped: int = 0  # number of tokens cut from the rest of the prompt
    response_tokens_dropped: int = 0
    """Number of tokens cut from responses, summed over the K responses (only in the `paper` protocol)."""

    @property
    def any(self) -> bool:
        """True if anything was cut."""
        return (self.posts_dropped, self.prompt_tokens_dropped, self.response_tokens_dropped) != (0, 0, 0)


@dataclass(frozen=True, eq=False)
class Tree:
    """One comparison in tokens."""

    prefix: np.ndarray  # int32 [p], shared by all responses; p may be 0
    responses: tuple[np.ndarray, ...]
    """K arrays int32 [r_k], r_k >= 1; `prefix` followed by `responses[k]` is the whole tokenised conversation k."""
    read: tuple[int, ...]  # for each response, the index within it of the token at which the score is read
    truncation: Truncation = field(default_factory=Truncation)

    __repr__ = short_repr

    @property
    def tokens(self) -> int:
        """Number of tokens of a forward pass: the prefix once, and every response."""
        return len(self.prefix) + sum(len(response) for response in self.responses)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(p, K, r): prefix length, number of responses, length of the longest response."""
        return len(self.prefix), len(self.responses), max(len(response) for response in self.responses)

    def groups(self, rope_switch: int | None) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the responses that can share the prefix: all, or shorter and longer conversations.

        Args:
          rope_switch: Conversations of more tokens have other rotary angles; None if all have the same.
        """
        every = tuple(range(len(self.responses)))
        if rope_switch is None:
            return (every,)
        lengths = [len(self.prefix) + len(response) for response in self.responses]
        groups = [tuple(k for k in every if (lengths[k] > rope_switch) == long) for long in (False, True)]
        return tuple(group for group in groups if group) or (every,)

    @property
    def equal_to(self) -> tuple[int, ...]:
        """Index of the first response with the same tokens and read position, for each response."""
        first: dict[tuple[bytes, int], int] = {}
        keys = ((response.tobytes(), read) for response, read in zip(self.responses, self.read, strict=True))
        return tuple(first.setdefault(key, k) for k, key in enumerate(keys))

    def sequence(self, k: int) -> np.ndarray:
        """Return the whole conversation `k`, int32 [p + r_k]."""
        return np.concatenate([self.prefix, self.responses[k]])


def has_equal_sides(equal_to: Sequence[int], labels: Sequence[float]) -> bool:
    """Return True if a response with the highest label equals one with a lower label, by `Tree.equal_to`."""
    if len(set(equal_to)) == len(equal_to):
        return False
    best = {first for first, label in zip(equal_to, labels, strict=True) if label == max(labels)}
    return any(first in best for first, label in zip(equal_to, labels, strict=True) if label < max(labels))


def common_run(sequences: Sequence[np.ndarray]) -> int:
    """Return the length of the longest common prefix of `sequences`."""
    first = sequences[0]
    run = len(first)
    for other in sequences[1:]:
        run = min(run, len(other))
        different = first[:run] != other[:run]
        if different.any():
            run = int(different.argmax())
    return run


def build_tree(
    sequences: Sequence[Sequence[int] | np.ndarray],
    *,
    read: Sequence[int] | None = None,
    truncation: Truncation | None = None,
) -> Tree:
    """Split K tokenised conversations into a shared prefix and K responses.

    Args:
      sequences: K >= 1 non-empty sequences of token ids, one whole conversation each.
      read: Index, in each sequence, of the token at which to read the score; the last token if not given.
      truncation: Truncation to record in the tree.

    Returns:
      The tree. Its prefix is the longest common run of ids, shortened if needed: every response has at least one token
      and contains its read position.

    Raises:
      ValueError: There are no sequences, one is empty, or a read position is outside its sequence.
    """
    arrays = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
    if not arrays:
        raise ValueError("a tree needs at least one sequence, found none")
    for k, array in enumerate(arrays):
        if array.ndim != 1 or len(array) == 0:
            raise ValueError(
                f"sequence {k}: expected a non-empty list of token ids, found shape {array.shape}"
            )
    positions = [len(array) - 1 for array in arrays] if read is None else [int(position) for position in read]
    if len(positions) != len(arrays):
        raise ValueError(f"expected {len(arrays)} read positions, found {len(positions)}")
    for k, (position, array) in enumerate(zip(positions, arrays, strict=True)):
        if not 0 <= position < len(array):
            raise ValueError(f"sequence {k}: read position {position} is outside its {len(array)} tokens")
    # A read position is at most the last index, so this also leaves every response one token.
    split = min(common_run(arrays), *positions)
    return Tree(
        prefix=arrays[0][:split].copy(),
        responses=tuple(array[split:].copy() for array in arrays),
        read=tuple(position - split for position in positions),
        truncation=truncation or Truncation(),
    )


def with_equal_splits(trees: Sequence[Tree]) -> list[Tree]:
    """Return the trees with the same split into prefix and responses for trees with a common conversation.

    A stream then computes the common conversation once. Prefixes become shorter by at most :data:`LEAST_SHARED` tokens,
    which the responses of their tree no longer share.
    """
    group = list(range(len(trees)))  # group of each tree
    members = {index: [index] for index in group}
    shortest, longest = ([len(tree.prefix) for tree in trees] for _ in range(2))
    first: dict[bytes, int] = {}
    for index, tree in enumerate(trees):
        begun = blake2b(tree.prefix.tobytes(), digest_size=16)
        for response in tree.responses:
            whole = begun.copy()
            whole.update(response.tobytes())
            one, other = group[first.setdefault(whole.digest(), index)], group[index]
            low, high = min(shortest[one], shortest[other]), max(longest[one], longest[other])
            if one != other and high - low <= LEAST_SHARED:
                one, other = sorted((one, other), key=lambda number: -len(members[number]))
                members[one] += (moved := members.pop(other))
                shortest[one], longest[one] = low, high
                for member in moved:
                    group[member] = one
    return [divided_at(tree, shortest[group[index]]) for index, tree in enumerate(trees)]


def divided_at(tree: Tree, length: int) -> Tree:
    """Return the tree with its prefix cut to `length` tokens; the rest moves to the responses."""
    moved = tree.prefix[length:]
    if not len(moved):
        return tree
    return replace(
        tree,
        prefix=tree.prefix[:length],
        responses=tuple(np.concatenate([moved, response]) for response in tree.responses),
        read=tuple(read + len(moved) for read in tree.read),
    )


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


@dataclass(frozen=True)
class EqualSides:
    """Comparisons in which a better and a worse response have the same tokens."""

    comparisons: int  # number of comparisons
    ids: list[str]  # ids of the first ones

    @classmethod
    def of(cls, ids: Iterable[str]) -> EqualSides | None:
        """Count ids, in the order of the data, and keep the first `NAMED`; None without ids."""
        every = list(ids)
        return cls(len(every), every[:NAMED]) if every else None

    def __str__(self) -> str:
        names, rest = ", ".join(map(quote, self.ids[:3])), self.comparisons - 3
        more = f" and {rest:,} more" if rest > 0 else ""
        return f"{counted(self.comparisons, 'comparison')} with the same tokens on both sides ({names}{more})"


@dataclass(frozen=True, slots=True)
class TokenisedComparison:
    """A comparison with tokens instead of text."""

    id: str  # id and user_id as in `prb_jax.records.comparison.Comparison`
    user_id: str | None
    tree: Callable[[], Tree]  # reads the tree


@dataclass(frozen=True)
class PlannedBatch:
    """A batch before it is made; for sequences, several batches with all responses of the members."""

    members: tuple[int, ...]
    computed: int  # computed tokens, without padding
    make: Callable[[], list[Any]]
    take: Callable[[list[np.ndarray]], list[np.ndarray]]
    """Returns the scores of each member from the scores of the batches."""

    __repr__ = short_repr


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of one batch of the comparisons given to ``Scorer.stream``."""

    indices: Sequence[int]  # indices in the list of comparisons, without the padding of the batch
    # one float32 array [K] per index, in the order of the comparison's responses
    scores: Sequence[np.ndarray]
    tokens: Sequence[int]  # tokens per index: the shared prefix once, and every response
    truncation: Sequence[Truncation]  # truncation per index
    computed: int | None = None
    """Computed tokens of the batch, without padding; less than the sum of `tokens` if comparisons share a prefix. None
    if the scorer does not report it."""
    equal_to: Sequence[tuple[int, ...]] = ()  # `Tree.equal_to` per index; empty if the scorer reads no tokens
    # tokens of each whole conversation per index; empty if the scorer reads no tokens
    lengths: Sequence[tuple[int, ...]] = ()

    __repr__ = short_repr
