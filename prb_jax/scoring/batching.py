"""Score comparisons: tokenise them in windows and pack them into streams, ahead of the device.

A thread tokenises the next window while the device works on the current one. Batches are queued on the device before
earlier results are read back. CPUs compute several batches at once. With several processes, each tokenises a part of a
window and all exchange their parts, so all make the same batches. Windows and shapes depend only on the whole input
and the options, not on rows that are already scored.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.models.model import matrix_flops_per_token
from prb_jax.platform.processes.sharing import process_count
from prb_jax.platform.sharding import mesh_shape
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Window, windows
from prb_jax.scoring.reader import Encode
from prb_jax.seams import get
from prb_jax.trees.packing import (
    READS_STEP,
    balanced,
    bins_of,
    coarse_length,
    cut_to_fullest,
    pack_streams,
    sort_trees,
    total_reads,
)
from prb_jax.trees.streams import PackedBatch, StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import (
    BLOCK,
    PlannedBatch,
    ScoredBatch,
    Skip,
    Tree,
    round_up,
    skip_nothing,
    with_equal_splits,
)

if TYPE_CHECKING:
    from prb_jax.models.attention.choice import StreamAttention
    from prb_jax.models.config.decoder import DecoderConfig
    from prb_jax.trees.sequences import SequenceBatch, SequenceOptions

Batch: TypeAlias = "StreamBatch | SequenceBatch"
BatchOptions: TypeAlias = "StreamOptions | SequenceOptions"

FIRST_WINDOW = 512  # comparisons of the first window: few, so that the device starts early

WINDOW = 4096
"""Comparisons of the later windows: many, so that few batches are left partly filled at their ends."""

_LARGEST = 4  # to keep a large tree whole, a stream is at most this many times as long as usual
WAITING = 1  # batches queued on the device beyond the running ones
MOST_LANES = 8  # concurrent batches, each with separate activations

# Tokens of a stream. Longer streams only miss the cache of a CPU; accelerators need thousands of tokens to be busy.
TOKENS_PER_SHARD = {"cpu": 8_192, "gpu": 65_536, "tpu": 32_768}

_PROGRAM_FLOPS = 5e11  # FLOPs that two cores compute in the five seconds of compiling a program

Dispatch = Callable[[Batch], jax.Array]

Gather = Callable[[], list[Tree]]
"""Returns the trees of all processes, in the order of the comparisons; a collective."""


Batcher = Callable[[Sequence[Tree], Sequence[int]], Iterator[PlannedBatch]]
"""Yields the batches of a window of trees at these indices, the largest first."""


def stream_scores(
    comparisons: Sequence[Comparison],
    *,
    encode: Encode,
    dispatch: Dispatch,
    options: BatchOptions,
    skip: Skip = skip_nothing,
    divide: bool = True,
    lanes: int = 1,
) -> Iterator[ScoredBatch]:
    """Score every comparison once; the batches of a window come with the largest shapes first.

    Args:
      dispatch: Starts scoring a batch and returns its pending scores: [S, M] of streams, [S] of sequences.
      options: Shapes of batches: streams or sequences.
      skip: Returns True if these rows do not need scores. `skip`, or its attribute `window` if present, is first called
        for whole windows: skipped windows are never tokenised.
      divide: If True, each of several processes calls `encode` for a part of the window; otherwise for all of it, e.g.
        for trees that are already in memory.
      lanes: Number of concurrent batches; see :func:`lanes`.

    Raises:
      PrbError: Errors of `encode`.
    """
    upcoming = windows(comparisons, first=FIRST_WINDOW, size=WINDOW)
    if (first := next(upcoming, None)) is None:
        return
    needed = _needed(chain(iter([first]), upcoming), getattr(skip, "window", skip))  # a chain keeps lists
    if (following := next(needed, None)) is None:
        return
    tokenise = _encode_alone
    if divide and process_count() > 1:
        tokenise = get("processes", "encode").value
    tokenise = partial(tokenise, encode=encode)
    sample = tokenise(first.comparisons)()
    batches = choose_batcher(sample, options, whole=first.last)
    known = [(first.places, sample)] if following is first else []  # not tokenised a second time
    needed = needed if following is first else chain(iter([following]), needed)
    del first, following  # frees their texts
    waiting: deque[Callable[[], ScoredBatch]] = deque()
    # One thread: tokenizers are multi-threaded, so two windows at once would only take turns.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="tokenise") as tokenising,
        ThreadPoolExecutor(lanes, thread_name_prefix="compute") as computing,
    ):
        start = partial(_start, dispatch=dispatch, computing=computing if lanes > 1 else None, shapes=set())
        windows_of_trees = _tokenised(known, needed, tokenise, thread=tokenising)
        try:
            for places, trees in windows_of_trees:
                for planned in batches(trees, places):
                    if skip(planned.members):
                        continue
                    members = [trees[index - places.start] for index in planned.members]
                    waiting.append(partial(_finish, planned, members, [*map(start, planned.make())]))
                    while len(waiting) > lanes + WAITING:
                        yield waiting.popleft()()
            while waiting:
                yield waiting.popleft()()
        finally:
            windows_of_trees.close()
            computing.shutdown(wait=False, cancel_futures=True)


def _encode_alone(comparisons: Sequence[Comparison], encode: Encode) -> Gather:
    trees = encode(comparisons)
    return lambda: trees


def _needed(upcoming: Iterable[Window], skip_window: Skip) -> Iterator[Window]:
    """Yield the windows that need scores; each is freed before the next one is read."""
    for window in upcoming:
        if not skip_window(window.places):
            yield window
        del window


def _tokenised(
    known: Sequence[tuple[range, list[Tree]]],
    needed: Iterator[Window],
    tokenise: Callable[[Sequence[Comparison]], Gather],
    *,
    thread: ThreadPoolExecutor,
) -> Generator[tuple[range, list[Tree]]]:
    """Yield `known`, then the places and trees of each window, while a thread reads and tokenises the next window."""

    def tokenise_next() -> tuple[range, Gather] | None:
        window = next(needed, None)
        return None if window is None else (window.places, tokenise(window.comparisons))

    ahead = thread.submit(tokenise_next)
    try:
        yield from known
        while (tokenised := ahead.result()) is not None:
            ahead = thread.submit(tokenise_next)
            # Gathered here, not in the thread: all processes must start their collectives in the same order.
            places, gather = tokenised
            yield places, gather()
    finally:
        ahead.cancel()


def _start(
    batch: Batch,
    *,
    dispatch: Dispatch,
    computing: ThreadPoolExecutor | None,
    shapes: set[tuple[tuple[int, ...], ...]],
) -> Callable[[], np.ndarray]:
    """Start scoring a batch; return a function that waits for its scores.

    A device runs the programs of one thread in sequence, and programs of several threads concurrently. The first batch
    of each shape is dispatched on the calling thread, so its program is compiled once and not by every thread. Its
    shape is added to `shapes`.
    """
    shape = tuple(np.shape(x) for x in jax.tree.leaves(batch))
    if computing is None or shape not in shapes:
        shapes.add(shape)
        scores = dispatch(batch)
        return lambda: np.asarray(scores, np.float32)
    return computing.submit(lambda: np.asarray(dispatch(batch), np.float32)).result


def _finish(
    planned: PlannedBatch, trees: Sequence[Tree], started: Sequence[Callable[[], np.ndarray]]
) -> ScoredBatch:
    """Wait for a batch and return the scores of its comparisons."""
    return ScoredBatch(
        indices=planned.members,
        scores=planned.take([scores() for scores in started]),
        tokens=[tree.tokens for tree in trees],
        truncation=[tree.truncation for tree in trees],
        computed=planned.computed,
        equal_to=[tree.equal_to for tree in trees],
        lengths=[tuple(len(tree.prefix) + len(one) for one in tree.responses) for tree in trees],
    )


def choose_batcher(sample: Sequence[Tree], options: BatchOptions, *, whole: bool) -> Batcher:
    """Return the batcher with the cheapest stream shape for trees like the sample; if `whole`, it is all the data."""
    if not isinstance(options, StreamOptions):
        return options.batches
    fit = None if options.keys is None else get("kernel tables", "fit").value
    sample = with_equal_splits(sample)
    shaped: StreamOptions = options if fit is None else fit(options, sample, whole=whole)
    shape = choose_stream_shape(sample, shaped, whole=whole)
    return partial(stream_batches, shape=shape, options=shaped)


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
    usual = ordered.tokens[ordered.tokens <= _LARGEST * options.tokens]  # larger trees get separate streams
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


def _scored_lengths(largest: int, options: StreamOptions) -> list[int]:
    """Return the stream lengths to try: around the usual length, and longer for larger trees."""
    top = 2 * options.tokens
    if largest > options.tokens:  # two or three large trees fill a stream better than one
        top = _LARGEST * options.tokens
    length, tried = options.multiple, []
    while length < top:
        tried.append(length)
        # Coarse steps for short streams, so calls with little data compile few programs.
        fine = length >= options.tokens // 2
        length = length + 2 * options.multiple if fine else coarse_length(length + 1, options.multiple)
    return [*tried, round_up(top, options.multiple)]


def stream_batches(
    trees: Sequence[Tree], indices: Sequence[int], *, shape: StreamShape, options: StreamOptions
) -> Iterator[PlannedBatch]:
    """Pack trees into streams: common prefixes share their tokens, and equal conversations are computed once."""
    trees = with_equal_splits(trees)
    for packed in pack_streams(trees, shape, options):
        yield PlannedBatch(
            members=tuple(indices[member] for stream in packed for member in stream.members),
            computed=sum(stream.tokens for stream in packed),
            make=lambda packed=packed: [make_stream_batch(trees, packed, options)],
            take=partial(rows_of_trees, trees, packed),
        )


def rows_of_trees(
    trees: Sequence[Tree], packed: PackedBatch, scores: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the scores [K] of each tree of a batch; `scores` holds one array [S, M], the scores at read places."""
    rows = []
    for row, stream in zip(scores[0], packed, strict=False):
        counts = [len(trees[member].responses) for member in stream.members]
        rows += [part.copy() for part in np.split(row[: sum(counts)], np.cumsum(counts)[:-1])]
    return rows


def batch_sizes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that determine the compiled program of a batch."""
    if not isinstance(batch, StreamBatch):
        return np.shape(batch.tokens), np.shape(batch.lengths)
    chunks = () if batch.chunks is None else (np.shape(batch.chunks.read),)
    return np.shape(batch.tokens), np.shape(batch.reads), *chunks


def stream_options(
    config: DecoderConfig, mesh: Mesh, attention: StreamAttention, batch_tokens: int | None = None
) -> StreamOptions:
    """Return the stream options for a decoder on these devices.

    `batch_tokens` is the approximate length of a stream; each batch shard of the mesh computes one stream at a time.
    """
    platform = mesh.devices.flat[0].platform
    options = StreamOptions(
        tokens=round_up(batch_tokens or TOKENS_PER_SHARD.get(platform, 8_192), BLOCK),
        streams=mesh_shape(mesh).batch_shards,
        window=config.sliding_window,
        taps=config.taps,
        rope_switch=config.rope_switch,
        program_cost=round(_PROGRAM_FLOPS / matrix_flops_per_token(config)),
    )
    return attention.shaped(options)


def lanes(mesh: Mesh, *, held: float = 0.0) -> int:
    """Return the number of concurrent batches: one per core on a single CPU device, otherwise 1.

    Attention processes blocks that are too small to split among threads, so a single batch leaves cores idle between
    its large products. Programs of several devices contain collectives and must run in one order.

    Args:
      held: Bytes that each batch holds; all batches together hold at most half of the machine's memory.
    """
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = MOST_LANES if held * MOST_LANES <= machine_memory() / 2 else int(machine_memory() / 2 / held)
    return max(1, min(cores, MOST_LANES, fitting))


@cache
def machine_memory() -> float:
    """Return the memory of the machine in bytes, or of the container if less; infinity if unknown."""
    try:
        memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            memory = min(memory, float(text))
    return memory
