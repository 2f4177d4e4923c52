"""Score a list of comparisons: tokenise, batch and dispatch ahead of the device.

A thread tokenises the next window while the device works on this one; batches are handed to the device
before the results of earlier ones are waited for. CPUs compute several batches side by side. Of several
processes each tokenises a part of a window, and all get the whole, so that all make the same batches. Windows
and shapes depend on the whole input and on the options alone, not on what is already scored.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import numpy as np

from prb_jax import errors
from prb_jax.data.comparison import Comparison
from prb_jax.errors import PrbError
from prb_jax.processes.sharing import gather_int32, parts_of, process_count, process_index
from prb_jax.scoring.batching import Batch, PlannedBatch, choose_batcher, sample_indices
from prb_jax.sources.large import LargeComparisons, Window, windows
from prb_jax.trees.packing import StreamOptions
from prb_jax.trees.shapes import ShapeOptions
from prb_jax.trees.tree import ScoredBatch, Tree, Truncation

FIRST_WINDOW = 512
"""Comparisons of the first window: few, so that the device starts early."""

WINDOW = 4096
"""Comparisons of the later windows: many, so that few batches are left partly filled at their ends."""

WAITING = 1
"""Batches given to the device and not yet read back, besides those that run."""

Encode = Callable[[Sequence[Comparison]], list[Tree]]
Dispatch = Callable[[Batch], jax.Array]
Skip = Callable[[Sequence[int]], bool]
Gather = Callable[[], list[Tree]]
"""Gives the trees of all processes, in the order of the indices; a collective."""

_AT_A_TIME = 4096
_SIZES = 5
_ERROR = -1


def stream_scores(
    comparisons: Sequence[Comparison],
    *,
    encode: Encode,
    dispatch: Dispatch,
    options: ShapeOptions | StreamOptions,
    skip: Skip = lambda indices: False,
    divide: bool = True,
    lanes: int = 1,
) -> Iterator[ScoredBatch]:
    """Score every comparison once; a window's batches come the largest shapes first.

    Args:
      comparisons: what to score.
      encode: comparisons to trees.
      dispatch: starts scoring a batch and returns its scores, not yet computed: [B, K] of trees, [S, M] of streams.
      options: how batches are shaped: streams or buckets.
      skip: tells of a batch's indices that they need no scores. It, or its `window` where it has one, is asked for
        whole windows first, whose comparisons are then not even tokenised.
      divide: of several processes each calls `encode` for its part. Without it each does for everything, which is
        for trees that are there already.
      lanes: batches that are computed side by side; see :func:`prb_jax.scoring.batching.lanes`.

    Raises:
      PrbError: as `encode`.
    """
    upcoming = windows(comparisons, first=FIRST_WINDOW, size=WINDOW)
    first = next(upcoming, None)
    if first is None:
        return
    waiting: deque[Callable[[], ScoredBatch]] = deque()
    # One thread: tokenizers use threads of their own, and two windows at once would only take turns.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="tokenise") as pool,
        ThreadPoolExecutor(lanes, thread_name_prefix="compute") as computing,
    ):
        start = partial(_start, dispatch=dispatch, computing=computing if lanes > 1 else None, shapes=set())

        def tokenise(chosen: Sequence[Comparison]) -> Gather:
            if divide:
                return encode_part(chosen, encode)
            trees = encode(chosen)
            return lambda: trees

        skip_window = getattr(skip, "window", skip)
        ahead = deque([first])

        def next_window() -> Window | None:
            """Return the next window that needs scores; no other is held while it is read."""
            window = ahead.popleft() if ahead else next(upcoming, None)
            while window is not None and skip_window(window.places):
                del window
                window = next(upcoming, None)
            return window

        following = next_window()
        if following is None:
            return
        ahead.append(following)
        sample: Sequence[int] = first.places
        if isinstance(options, ShapeOptions) and not isinstance(comparisons, LargeComparisons):
            sample = sample_indices(len(comparisons))
        sampled = first.comparisons if sample is first.places else [comparisons[index] for index in sample]
        trees = tokenise(sampled)()
        count = first.places.stop if first.last else WINDOW
        if not isinstance(comparisons, LargeComparisons):
            count = min(len(comparisons), WINDOW)
        batches = choose_batcher(trees, options, count=count, whole=first.last)
        known = dict(zip(sample, trees, strict=True))  # need not be tokenised again
        del first, following, sampled  # their texts are not held
        encoded: deque[Future[tuple[range, Gather] | None]] = deque()

        def tokenise_next() -> tuple[range, Gather] | None:
            """Read and tokenise a window; None where there are no more."""
            if (window := next_window()) is None:
                return None
            before = window.places.start
            unknown = [place - before for place in window.places if place not in known]
            chosen = window.comparisons
            if len(unknown) < len(chosen):
                chosen = [chosen[place] for place in unknown]
            return window.places, tokenise(chosen)

        try:
            encoded.append(pool.submit(tokenise_next))
            while True:
                encoded.append(pool.submit(tokenise_next))
                if (tokenised := encoded.popleft().result()) is None:
                    break
                # Gathered here and not in the thread: all processes must start their collectives in one order.
                part, gather = tokenised
                unknown = [place for place in part if place not in known]
                fresh = dict(zip(unknown, gather(), strict=True))
                trees = [fresh[index] if index in fresh else known[index] for index in part]
                for planned in batches(trees, part):
                    if skip(planned.members):
                        continue
                    members = [trees[index - part.start] for index in planned.members]
                    waiting.append(partial(_finish, planned, members, start(planned.make())))
                    while len(waiting) >= lanes + WAITING + 1:
                        yield waiting.popleft()()
            while waiting:
                yield waiting.popleft()()
        finally:
            for future in encoded:
                future.cancel()
            computing.shutdown(wait=False, cancel_futures=True)


def _start(
    batch: Batch,
    *,
    dispatch: Dispatch,
    computing: ThreadPoolExecutor | None,
    shapes: set[tuple[tuple[int, ...], ...]],
) -> Callable[[], np.ndarray]:
    """Start scoring a batch; returns what waits for its scores.

    A device runs the programs that one thread gives it one after another, and those of several threads side by side.

    Args:
      batch: of the host.
      dispatch: as of :func:`stream_scores`.
      computing: the threads, where batches run side by side.
      shapes: those so far. The first batch of a shape is given to the device here, so that its program is
        compiled once and not by every thread.
    """
    shape = tuple(np.shape(x) for x in jax.tree.leaves(batch))
    if computing is None or shape not in shapes:
        shapes.add(shape)
        scores = dispatch(batch)
        return lambda: np.asarray(scores, np.float32)
    return computing.submit(lambda: np.asarray(dispatch(batch), np.float32)).result


def _finish(planned: PlannedBatch, trees: Sequence[Tree], scores: Callable[[], np.ndarray]) -> ScoredBatch:
    """Wait for a batch and take out the scores of its comparisons."""
    return ScoredBatch(
        indices=planned.members,
        scores=planned.take(scores()),
        tokens=[tree.tokens for tree in trees],
        truncation=[tree.truncation for tree in trees],
        computed=planned.computed,
    )


def encode_part(comparisons: Sequence[Comparison], encode: Encode) -> Gather:
    """Tokenise this process's part of the comparisons; what is returned exchanges the parts.

    An error of one process is raised in all of them when the parts are exchanged.
    """
    if process_count() == 1:
        trees = encode(comparisons)
        return lambda: trees
    parts = parts_of(len(comparisons))
    try:
        sent = _packed(encode([comparisons[place] for place in parts[process_index()]]))
    except PrbError as error:
        text = json.dumps([type(error).__name__, str(error)])
        sent = np.concatenate([[_ERROR], np.frombuffer(text.encode(), np.uint8)]).astype(np.int32)
    return partial(_gather, sent, parts)


def _gather(sent: np.ndarray, parts: Sequence[Sequence[int]]) -> list[Tree]:
    trees: dict[int, Tree] = {}
    for process, vector in enumerate(gather_int32(sent)):
        if len(vector) and vector[0] == _ERROR:
            kind, text = json.loads(vector[1:].astype(np.uint8).tobytes())
            raise getattr(errors, kind)(text if process == process_index() else f"process {process}: {text}")
        trees.update(zip(parts[process], _unpacked(vector), strict=True))
    return [trees[place] for place in range(len(trees))]


def encode_by_processes(comparisons: Sequence[Comparison], encode: Encode) -> list[Tree]:
    """As ``encode``; of several processes each tokenises its part. A collective.

    Raises:
      PrbError: as ``encode``, in all processes.
    """
    if process_count() == 1:
        return encode(comparisons)
    trees: list[Tree] = []
    for start in range(0, len(comparisons), _AT_A_TIME):
        trees += encode_part(comparisons[start : start + _AT_A_TIME], encode)()
    return trees


def _packed(trees: Sequence[Tree]) -> np.ndarray:
    """int32: for each tree its sizes, what was cut, where it is read, and its tokens."""
    parts: list[np.ndarray] = []
    for tree in trees:
        cut = tree.truncation
        sizes = [len(tree.prefix), len(tree.responses)]
        sizes += [cut.posts_dropped, cut.prompt_tokens_dropped, cut.response_tokens_dropped]
        parts.append(np.asarray([*sizes, *map(len, tree.responses), *tree.read], np.int32))
        parts += [tree.prefix, *tree.responses]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _unpacked(vector: np.ndarray) -> list[Tree]:
    trees: list[Tree] = []
    at = 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return vector[at - count : at]

    while at < len(vector):
        prefix, responses, *cut = take(_SIZES).tolist()
        lengths, read = take(responses).tolist(), take(responses).tolist()
        trees.append(
            Tree(
                prefix=take(prefix),
                responses=tuple(take(length) for length in lengths),
                read=tuple(read),
                truncation=Truncation(*cut),
            )
        )
    return trees
