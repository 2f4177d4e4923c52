"""A tree: the tokens of one shared prefix and of K responses that continue it.

The split is made in token space. Each full conversation (prompt and response) is tokenised exactly
as it would be alone; the prefix is the longest common run of ids of the K sequences. So a tree's
scores equal the scores of K separate forwards, whatever the chat template writes around a response
and whatever the tokenizer merges at its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from prb_jax.errors import counted, quote, short_repr

EQUAL_SIDES: Final = "equal_after_template"  # the entry of a summary or record that holds `EqualSides`
NAMED: Final = 10  # comparisons with equal sides that are named


@dataclass(frozen=True)
class Truncation:
    """What was left out of one comparison so that it fits its length limit."""

    posts_dropped: int = 0  # whole profile posts, counted from the end of the ranked profile
    prompt_tokens_dropped: int = 0  # tokens by which the rest of the prompt was shortened
    response_tokens_dropped: int = 0
    """Response tokens lost, summed over the K responses (only the `paper` protocol ever cuts a response)."""

    @property
    def any(self) -> bool:
        """Whether anything at all was left out."""
        return (self.posts_dropped, self.prompt_tokens_dropped, self.response_tokens_dropped) != (0, 0, 0)


@dataclass(frozen=True, eq=False)
class Tree:
    """One comparison in tokens."""

    prefix: np.ndarray  # int32 [p], shared by all responses; p may be 0
    responses: tuple[np.ndarray, ...]
    """K arrays int32 [r_k], r_k >= 1; `prefix` followed by `responses[k]` is the whole tokenised conversation k."""
    read: tuple[int, ...]  # for each response, the index within it of the token whose state gives the score
    truncation: Truncation = field(default_factory=Truncation)  # what was left out to fit the length limit

    __repr__ = short_repr

    @property
    def tokens(self) -> int:
        """Number of tokens a forward needs: the prefix once and every response."""
        return len(self.prefix) + sum(len(response) for response in self.responses)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(p, K, r): prefix length, number of responses, length of the longest response."""
        return len(self.prefix), len(self.responses), max(len(response) for response in self.responses)

    @property
    def equal_to(self) -> tuple[int, ...]:
        """For each response, the index of the first response with the same tokens and read position."""
        first: dict[tuple[bytes, int], int] = {}
        keys = ((response.tobytes(), read) for response, read in zip(self.responses, self.read, strict=True))
        return tuple(first.setdefault(key, k) for k, key in enumerate(keys))

    def sequence(self, k: int) -> np.ndarray:
        """The whole conversation `k`, int32 [p + r_k], as it would be scored alone."""
        return np.concatenate([self.prefix, self.responses[k]])


def has_equal_sides(equal_to: Sequence[int], labels: Sequence[float]) -> bool:
    """Return whether a response with the highest label equals one with a lower label, by `Tree.equal_to`."""
    if len(set(equal_to)) == len(equal_to):
        return False
    best = {first for first, label in zip(equal_to, labels, strict=True) if label == max(labels)}
    return any(first in best for first, label in zip(equal_to, labels, strict=True) if label < max(labels))


def common_run(sequences: Sequence[np.ndarray]) -> int:
    """Length of the longest run of ids that all `sequences` start with."""
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
    """Splits K tokenised conversations into a shared prefix and K responses.

    Args:
      sequences: K >= 1 non-empty sequences of token ids, one whole conversation each.
      read: for each sequence the index, within the whole sequence, of the token to read the score
        at; its last token when not given.
      truncation: recorded in the tree.

    Returns:
      The tree. Its prefix is the longest common run of ids, shortened where needed so that every
      response holds at least one token and the token it is read at.

    Raises:
      ValueError: no sequence, an empty one, or a read position outside its sequence.
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


@dataclass(frozen=True)
class EqualSides:
    """Comparisons in which two responses that should be told apart have the same tokens."""

    comparisons: int  # how many
    ids: list[str]  # of the first ones

    @classmethod
    def of(cls, ids: Iterable[str]) -> EqualSides | None:
        """Count ids, which are in the order of the data, and keep the first ones; None if there are none."""
        every = list(ids)
        return cls(len(every), every[:NAMED]) if every else None

    def __str__(self) -> str:
        names, rest = ", ".join(map(quote, self.ids[:3])), self.comparisons - 3
        more = f" and {rest:,} more" if rest > 0 else ""
        return f"{counted(self.comparisons, 'comparison')} with the same tokens on both sides ({names}{more})"


@dataclass(frozen=True, slots=True)
class TokenisedComparison:
    """A comparison by its tokens, in place of its text."""

    id: str  # this and the user as of `prb_jax.records.comparison.Comparison`
    user_id: str | None
    tree: Callable[[], Tree]  # reads it


@dataclass(frozen=True)
class PlannedBatch:
    """A batch before it is made; of sequences several batches, which hold all responses of their members."""

    members: tuple[int, ...]
    computed: int  # tokens that are computed for them, without padding
    make: Callable[[], list[Any]]
    take: Callable[[list[np.ndarray]], list[np.ndarray]]
    """Gives the scores of each member, from those of the batches."""

    __repr__ = short_repr


@dataclass(frozen=True)
class ScoredBatch:
    """The scores of some of the comparisons given to ``Scorer.stream``."""

    indices: Sequence[int]  # positions in the list of comparisons, without the padding of the batch
    # one float32 array [K] for each index, in the order of the comparison's responses
    scores: Sequence[np.ndarray]
    tokens: Sequence[int]  # tokens of each index: the shared prefix once, and every response
    truncation: Sequence[Truncation]  # what was cut from each index to make it fit
    computed: int | None = None
    """Tokens computed for all of them together, without padding; less than the sum of their own where several begin
    alike. None where a scorer does not tell."""
    equal_to: Sequence[
        tuple[int, ...]
    ] = ()  # `Tree.equal_to` of each index; empty where a scorer reads no tokens

    __repr__ = short_repr
