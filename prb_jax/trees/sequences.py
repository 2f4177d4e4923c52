"""Plain sequences in batches of a few shapes, for encoders.

The states of an encoder depend on later tokens too, so sequences cannot share the computation of a prefix; only equal
sequences are computed once. Sequences of similar length share a batch. The shapes of batches depend only on the lengths
and the options, so a continued run forms the same batches and gives the same bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.platform.sharding import mesh_shape
from prb_jax.trees.tree import PlannedBatch, Tree, round_up

# Padded tokens of a batch per batch shard of the mesh. On CPUs attention scores should fit the cache: per token,
# sequences of 512 take 1.6 times as long in batches of 16,384.
TOKENS_PER_SHARD = {"cpu": 1_024, "gpu": 65_536, "tpu": 32_768}

# FLOPs that a device could compute during the compilation of a program.
PROGRAM_FLOPS = {"cpu": 1e11, "gpu": 5e14, "tpu": 5e14}

STEP = 8  # the lengths of batches are multiples of this

MOST_SAVED = 200
"""A further length must save at least 1 / MOST_SAVED of all tokens."""

GROUP = 16
"""Approximate number of batches whose comparisons are finished together: a killed run loses a few groups."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceBatch:
    """S sequences padded on the right to L tokens. A JAX pytree of int32 arrays."""

    tokens: np.ndarray | jax.Array  # [S, L] token ids
    lengths: np.ndarray | jax.Array  # [S], 0 in rows without a sequence
    places: np.ndarray | jax.Array | None = None
    """[B, K], row of each response of each comparison. With it a scorer returns [B, K], without it [S]."""

    __repr__ = short_repr


@dataclass(frozen=True)
class SequenceOptions:
    """Options that shape batches of sequences."""

    tokens: int  # maximum tokens of a batch including padding; a batch has at least `divisor` rows
    limit: int  # tokens of the longest sequence
    divisor: int = 1  # rows of a batch are a multiple of this, the batch shards of the mesh
    program_cost: float = 0  # cost of compiling one more program, in tokens of the model
    fixed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Length -> allowed rows of batches, in ascending order: the shapes that a server compiles before its first
    request. If empty, lengths and rows are chosen from the data."""

    def most_rows(self, length: int) -> int:
        """Return the number of rows of a full batch."""
        return max(self.tokens // length // self.divisor, 1) * self.divisor

    def rows(self, length: int, waiting: int) -> int:
        """Return the number of rows of the next batch if `waiting` sequences are left."""
        if self.fixed:
            return next((rows for rows in self.fixed[length] if rows >= waiting), self.fixed[length][-1])
        most = self.most_rows(length)
        few = self.divisor << max(-(-waiting // self.divisor) - 1, 0).bit_length()
        return few if (most - few) * length > self.program_cost else most

    def batches(self, trees: Sequence[Tree], indices: Sequence[int]) -> Iterator[PlannedBatch]:
        """Yield batches of the trees' sequences by length; a sequence of several groups is computed once."""
        plan = plan_sequences(trees, self)
        makers: dict[int, SequenceGroup] = {}  # batch -> the group that makes it
        scores: dict[int, np.ndarray] = {}  # sequence -> score

        def make(group: SequenceGroup) -> list[SequenceBatch]:
            own = [number for number in group.batches if makers.setdefault(number, group) is group]
            return [make_sequence_batch(plan.found.sequences, plan.batches[number]) for number in own]

        def take(group: SequenceGroup, computed: list[np.ndarray]) -> list[np.ndarray]:
            own = [number for number in group.batches if makers[number] is group]
            for number, values in zip(own, computed, strict=True):
                scores.update(zip(plan.batches[number].members, values, strict=False))
            return [
                np.stack([scores[place] for place in plan.found.places[member]]) for member in group.members
            ]

        for group in plan.groups:
            yield PlannedBatch(
                members=tuple(indices[member] for member in group.members),
                computed=group.tokens,
                make=partial(make, group),
                take=partial(take, group),
            )


def sequence_options(
    mesh: Mesh, *, limit: int, flops_per_token: float, batch_tokens: int | None = None
) -> SequenceOptions:
    """Return the options for sequences of at most `limit` tokens on these devices.

    Args:
      mesh: Device mesh; rows of a batch are split over ``data`` and ``fsdp``.
      limit: Tokens of the longest sequence.
      flops_per_token: FLOPs of the model per token.
      batch_tokens: Tokens of a batch, instead of the default for these devices.
    """
    platform, shards = mesh.devices.flat[0].platform, mesh_shape(mesh).batch_shards
    return SequenceOptions(
        tokens=batch_tokens or shards * TOKENS_PER_SHARD.get(platform, 1_024),
        limit=limit,
        divisor=shards,
        program_cost=PROGRAM_FLOPS.get(platform, 1e11) / flops_per_token,
    )


@dataclass(frozen=True)
class PackedSequences:
    """The sequences of one batch."""

    rows: int  # S; rows beyond `members` are empty
    length: int  # L
    members: tuple[int, ...]  # indices in the list of sequences, at most `rows`

    __repr__ = short_repr


def pack_sequences(
    lengths: Sequence[int] | np.ndarray, order: Sequence[int], options: SequenceOptions
) -> list[PackedSequences]:
    """Cut sequences, in this order, into batches; only the last batch can be partly empty.

    Args:
      lengths: Tokens of each sequence, at most the limit of the options.
      order: Indices of the sequences, with similar lengths next to each other.
      options: Options of batches.
    """
    sizes = np.maximum(np.asarray(lengths, np.int64)[list(order)], 1)
    tops = sorted(options.fixed) or choose_lengths(sizes, options)

    def padded(longest: int) -> int:
        return tops[bisect_left(tops, longest)]

    batches: list[PackedSequences] = []
    start = 0
    while start < len(sizes):
        length = rows = 0
        longest = sizes[start]
        while longest > length:
            length = padded(longest)
            rows = options.rows(length, len(sizes) - start)
            longest = sizes[start : start + rows].max()
        batches.append(PackedSequences(rows, length, tuple(order[start : start + rows])))
        start += rows
    return batches


def choose_lengths(lengths: np.ndarray, options: SequenceOptions) -> list[int]:
    """Return the padded lengths, in ascending order, with the least total cost of padding and programs."""
    if not len(lengths):
        return []
    # Steps of a sixteenth to a thirty-second, so any data have few distinct lengths.
    steps = np.maximum(STEP, 1 << np.maximum(np.frexp(lengths)[1] - 5, 0))
    tops, counts = np.unique(np.minimum(-(-lengths // steps) * steps, options.limit), return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)])
    program = max(options.program_cost, float(lengths.sum()) / MOST_SAVED)
    # Cheapest way to pad the shortest n lengths, for every n; the last shape covers lengths from `begins` on.
    costs, begins = np.zeros(len(tops) + 1), np.zeros(len(tops) + 1, np.int64)
    for n, top in enumerate(tops, start=1):
        tried = costs[:n] + (ends[n] - ends[:n]) * top + program
        begins[n] = tried.argmin()
        costs[n] = tried[begins[n]]
    chosen: list[int] = []
    n = len(tops)
    while n:
        chosen.append(int(tops[n - 1]))
        n = int(begins[n])
    return chosen[::-1]


def make_sequence_batch(sequences: Sequence[np.ndarray], packed: PackedSequences) -> SequenceBatch:
    """Return the arrays of a batch."""
    tokens, lengths = np.zeros((packed.rows, packed.length), np.int32), np.zeros(packed.rows, np.int32)
    for row, member in enumerate(packed.members):
        tokens[row, : len(sequences[member])] = sequences[member]
        lengths[row] = len(sequences[member])
    return SequenceBatch(tokens, lengths)


@dataclass(frozen=True)
class DistinctSequences:
    """The distinct sequences of trees."""

    sequences: list[np.ndarray]  # int32, each a prompt with a response
    places: list[list[int]]  # for each tree, the index of each response's sequence

    __repr__ = short_repr

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sequence, int64."""
        return np.asarray([len(sequence) for sequence in self.sequences], np.int64)


def distinct_sequences(trees: Sequence[Tree]) -> DistinctSequences:
    """Return the distinct sequences of trees."""
    known: dict[bytes, int] = {}
    found = DistinctSequences([], [])
    for tree in trees:
        own = [tree.sequence(k) for k in range(len(tree.responses))]
        found.places.append([known.setdefault(sequence.tobytes(), len(known)) for sequence in own])
        for sequence, place in zip(own, found.places[-1], strict=True):
            if place == len(found.sequences):
                found.sequences.append(sequence)
    return found


def batch_of_trees(trees: Sequence[Tree], options: SequenceOptions) -> SequenceBatch:
    """Return one batch of all sequences of trees, with the row of each response; further rows are empty."""
    found = distinct_sequences(trees)
    count, longest = len(found.sequences), int(found.lengths.max())
    whole = PackedSequences(
        round_up(count, options.divisor), min(round_up(longest, STEP), options.limit), tuple(range(count))
    )
    places = np.zeros((round_up(len(trees), options.divisor), max(map(len, found.places))), np.int32)
    for row, of_tree in enumerate(found.places):
        places[row, : len(of_tree)] = of_tree
    return replace(make_sequence_batch(found.sequences, whole), places=places)


@dataclass(frozen=True)
class SequenceGroup:
    """Comparisons that are finished together, and the batches that they need."""

    members: tuple[int, ...]  # indices in the list of trees
    batches: tuple[
        int, ...
    ]  # all batches with a sequence of the members, possibly shared with earlier groups
    tokens: int  # tokens of the sequences that are not in earlier groups


@dataclass(frozen=True)
class SequencePlan:
    """The batches and groups of a window of trees."""

    found: DistinctSequences
    batches: list[PackedSequences]
    groups: list[SequenceGroup]

    __repr__ = short_repr


def plan_sequences(trees: Sequence[Tree], options: SequenceOptions) -> SequencePlan:
    """Put the sequences of trees into batches by length, the longest first, and the trees into groups.

    With fixed shapes each batch is a group, and trees have one response each.
    """
    found = distinct_sequences(trees)
    lengths = found.lengths
    longest = [lengths[places].max() for places in found.places]
    owners, group_of = np.full(len(lengths), -1), np.zeros(len(trees), np.int64)
    begun = 0  # tokens in the groups so far
    for tree in np.argsort(-np.asarray(longest), kind="stable"):
        fresh = [place for place in set(found.places[tree]) if owners[place] < 0]
        owners[fresh] = group_of[tree] = 0 if options.fixed else begun // (GROUP * options.tokens)
        begun += int(lengths[fresh].sum())
    # Every second group is sorted in ascending order, so lengths are similar where groups meet.
    order = np.lexsort((np.where(owners % 2, lengths, -lengths), owners)).tolist()
    batches = pack_sequences(lengths, order, options)
    batch_of = np.zeros(len(lengths), np.int64)
    for number, batch in enumerate(batches):
        batch_of[list(batch.members)] = number
    if options.fixed:
        owners, group_of = batch_of, batch_of[[places[0] for places in found.places]]
    groups = []
    for number in np.unique(group_of):
        members = np.flatnonzero(group_of == number).tolist()
        needed = {int(batch_of[place]) for member in members for place in found.places[member]}
        tokens = int(lengths[owners == number].sum())
        groups.append(SequenceGroup(tuple(members), tuple(sorted(needed)), tokens))
    return SequencePlan(found, batches, groups)
