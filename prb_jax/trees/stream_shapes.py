"""Choose the shape of the streams of a scoring run; :mod:`prb_jax.trees.step_shapes` chooses those of training. Before
that, divide comparisons with a common conversation at the same place, so a stream computes the conversation once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from prb_jax.trees.packing import (
    LEAST_SHARED,
    PackedBatch,
    SortedTrees,
    StreamOptions,
    StreamShape,
    Unit,
    balanced,
    coarse_length,
    divide,
    first_fit,
    pack_streams,
    sort_trees,
    total_reads,
    total_tokens,
)
from prb_jax.trees.tree import Tree, round_up

READS_STEP = 16  # read places of a stream are a multiple of this
LARGEST = 4  # to keep a large tree whole, a stream is at most this many times as long as usual
STREAM_COST = 256  # cost of one more batch of streams, in tokens of each stream


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


def choose_stream_shape(trees: Sequence[Tree], options: StreamOptions, *, whole: bool) -> StreamShape:
    """Return the cheapest shape of streams for these trees.

    Args:
      trees: All trees, or the first of many.
      options: Options of streams, with their approximate length.
      whole: True if `trees` are all trees; False if more trees of their kind follow.
    """
    if options.fixed:
        return options.fixed[-1]
    ordered = sort_trees(trees, options)
    usual = ordered.tokens[ordered.tokens <= LARGEST * options.tokens]  # larger trees get separate streams
    largest, needed = (
        int(usual.max(initial=1)),
        int((ordered.tokens - ordered.shared).sum()) - ordered.saved(slice(None)),
    )
    lengths = _scored_lengths(largest, options)
    least = options.tokens
    if whole:  # few trees should fill two shorter streams, one for each of two cores
        least = max(min(options.tokens // 2, -(-needed // 2)), largest)
    lengths = [length for length in lengths if length >= least] or lengths[-1:]

    def cost(streams: int, length: int) -> int:
        # Tokens computed one stream at a time, plus tokens computed in pairs of streams. Both always count, so the
        # streams do not depend on this machine.
        return (streams + round_up(streams, 2)) * length

    best: tuple[int, int, int] | None = None
    for length in lengths:
        if best is not None and cost(-(-needed // length), length) >= best[0]:
            continue  # too expensive even without gaps
        bins = bins_of(ordered, length)
        if whole and length >= options.tokens // 2:  # lengths are tried in steps of two blocks there
            length = cut_to_fullest([bins], length, options.multiple)
        total = cost(len(bins), length)
        # Balanced streams count too: some have more read places than any stream before.
        even = balanced(bins, StreamShape(length, length))
        reads = max((total_reads(units) for units in [*bins, *even]), default=1)
        if bins and (best is None or total < best[0]):
            best = total, length, reads
    if best is None:  # all trees are larger than usual
        best = 0, options.tokens, 1
    spare = 1 if whole else 2
    return StreamShape(best[1], min(best[1], round_up(spare * best[2], READS_STEP)))


def pack_together(trees: Sequence[Tree], options: StreamOptions) -> PackedBatch:
    """Pack trees into one batch of at most `options.streams` streams, about as short as possible."""
    ordered = sort_trees(trees, options)
    needed = -(-int((ordered.tokens - ordered.shared).sum()) // options.streams)
    length, reads = max(needed, int(ordered.tokens.max())), int(ordered.reads.sum())
    length, batches = round_up(length, options.multiple), []
    while len(batches) != 1:
        batches = pack_streams(trees, StreamShape(length, reads), options)
        length += options.multiple
    (packed,) = batches
    most = max(sum(len(trees[member].responses) for member in stream.members) for stream in packed)
    shape = StreamShape(packed[0].shape.tokens, round_up(most, READS_STEP))
    return tuple(replace(stream, shape=shape) for stream in packed)


def bins_of(trees: SortedTrees, length: int) -> list[list[Unit]]:
    """Return the units of each stream of this length; longer trees are left out."""
    units = divide(trees, most_tokens=length, most_reads=length)
    return first_fit([unit for unit in units if unit.tokens <= length], StreamShape(length, length))


def _scored_lengths(largest: int, options: StreamOptions) -> list[int]:
    """Return the stream lengths to try: around the usual length, and longer for larger trees."""
    top = 2 * options.tokens
    if largest > options.tokens:  # two or three large trees fill a stream better than one
        top = LARGEST * options.tokens
    length, tried = options.multiple, []
    while length < top:
        tried.append(length)
        # Coarse steps for short streams, so calls with little data compile few programs.
        fine = length >= options.tokens // 2
        length = length + 2 * options.multiple if fine else coarse_length(length + 1, options.multiple)
    return [*tried, round_up(top, options.multiple)]


def cut_to_fullest(bins_of_steps: Sequence[list[list[Unit]]], length: int, block: int) -> int:
    """Return the length of streams cut to the fullest balanced stream, a multiple of ``block``.

    The length stays if cutting it would need more streams. Each list of bins is the result of :func:`first_fit` with
    this length.
    """
    shape = StreamShape(length, length)
    fullest = max(
        (total_tokens(units) for bins in bins_of_steps for units in balanced(bins, shape)),
        default=1,
    )
    cut = min(length, round_up(fullest, block))
    as_few = cut == length or all(
        len(first_fit([unit for units in bins for unit in units], StreamShape(cut, length))) == len(bins)
        for bins in bins_of_steps
    )
    return cut if as_few else length
