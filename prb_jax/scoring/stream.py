"""Scores a list of comparisons: tokenise, batch and dispatch ahead of the device.

A thread tokenises the next window while the device works on this one; batches are handed to the device
before the results of earlier ones are waited for. CPUs compute several batches side by side. Of several
processes each tokenises a part of a window, and all get the whole, so that all deal the same batches. Windows
and shapes depend on the whole input and on the options alone, not on what is already scored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

import jax
import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.scoring.dealing import Batch, Dealer, Dealt, dealer_of
from prb_jax.scoring.tokenising import Encode, Part, encode_part, gather_parts, whole_part
from prb_jax.sources.large import reach, read_ahead, windows
from prb_jax.trees.batches import ScoredBatch
from prb_jax.trees.packing import StreamOptions
from prb_jax.trees.shapes import ShapeOptions
from prb_jax.trees.tree import Tree

FIRST_WINDOW = 512
"""Comparisons of the first window: few, so that the device starts early."""

WINDOW = 4096
"""Comparisons of the later windows: many, so that few batches are left partly filled at their ends."""

WAITING = 1
"""Batches given to the device and not yet read back, besides those that run."""

Dispatch = Callable[[Batch], jax.Array]
Skip = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class _Pending:
    dealt: Dealt
    trees: list[Tree]
    scores: Callable[[], np.ndarray]


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
    """Scores every comparison once; a window's batches come the largest shapes first.

    Args:
      comparisons: what to score.
      encode: comparisons to trees.
      dispatch: starts scoring a batch and returns its scores, not yet computed: [B, K] of trees, [S, M] of streams.
      options: how batches are shaped: streams or buckets.
      skip: tells of a batch's indices that they need no scores. It is asked for whole windows first,
        whose comparisons are then not even tokenised.
      divide: of several processes each calls `encode` for its part. Without it each does for everything, which is
        for trees that are there already.
      lanes: batches that are computed side by side; see :func:`prb_jax.scoring.batch_shapes.lanes`.

    Raises:
      PrbError: as `encode`.
    """
    parts = windows(comparisons, first=FIRST_WINDOW, size=WINDOW)
    first = next(parts, None)
    if first is None:
        return
    waiting: deque[_Pending] = deque()
    # One thread: tokenizers use threads of their own, and two windows at once would only take turns.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="tokenise") as pool,
        ThreadPoolExecutor(lanes, thread_name_prefix="compute") as computing,
    ):
        start = partial(_start, dispatch=dispatch, computing=computing if lanes > 1 else None, known=set())

        def part_of(indices: Sequence[int]) -> Part:
            if not divide:
                return whole_part(comparisons, indices, encode)
            return encode_part(comparisons, indices, encode)

        upcoming = (part for part in chain([first], parts) if not skip(part))  # asked for one after another
        following = next(upcoming, None)
        if following is None:
            return
        upcoming = chain([following], upcoming)
        dealer = dealer_of(options)
        known = _choose_shapes(dealer, comparisons, first, part_of)
        encoded: deque[tuple[range, Future[Part]]] = deque()

        def prepare() -> None:
            """Begin to tokenise the next window, and those after it of which this process has the text already."""
            for part in upcoming:
                encoded.append((part, pool.submit(part_of, _missing(part, known))))
                if part.stop + WINDOW > read_ahead(comparisons, encoded[0][0].start):
                    return

        try:
            prepare()
            while encoded:
                prepare()
                part, tokenised = encoded.popleft()
                # Gathered here and not in the thread: all processes must start their collectives in one order.
                fresh = dict(zip(_missing(part, known), gather_parts(tokenised.result()), strict=True))
                trees = [fresh[index] if index in fresh else known[index] for index in part]
                for dealt in dealer.deal(trees, part):
                    if skip(dealt.members):
                        continue
                    members = [trees[index - part.start] for index in dealt.members]
                    waiting.append(_Pending(dealt, members, start(dealt.make())))
                    while len(waiting) >= lanes + WAITING + 1:
                        yield _finish(waiting.popleft())
            while waiting:
                yield _finish(waiting.popleft())
        finally:
            for _, future in encoded:
                future.cancel()
            computing.shutdown(wait=False, cancel_futures=True)


def _start(
    batch: Batch,
    *,
    dispatch: Dispatch,
    computing: ThreadPoolExecutor | None,
    known: set[tuple[tuple[int, ...], ...]],
) -> Callable[[], np.ndarray]:
    """Start scoring a batch; returns what waits for its scores.

    A device runs the programs that one thread gives it one after another, and those of several threads side by side.

    Args:
      batch: of the host.
      dispatch: as of :func:`stream_scores`.
      computing: the threads, where batches run side by side.
      known: the shapes so far. The first batch of a shape is given to the device here, so that its program is
        compiled once and not by every thread.
    """
    shapes = tuple(np.shape(x) for x in jax.tree.leaves(batch))
    if computing is None or shapes not in known:
        known.add(shapes)
        scores = dispatch(batch)
        return lambda: np.asarray(scores, np.float32)
    return computing.submit(lambda: np.asarray(dispatch(batch), np.float32)).result


def _choose_shapes(
    dealer: Dealer,
    comparisons: Sequence[Comparison],
    first: range,
    part_of: Callable[[Sequence[int]], Part],
) -> dict[int, Tree]:
    """Let the dealer choose shapes from a sample; returns the sample's trees, which need not be encoded again."""
    sample = dealer.sample(lambda: len(comparisons), first)
    trees = gather_parts(part_of(sample))
    dealer.begin(
        trees,
        count=lambda: min(len(comparisons), WINDOW),
        whole=reach(comparisons, first.stop + 1) == first.stop,
    )
    return dict(zip(sample, trees, strict=True))


def _missing(part: range, known: Mapping[int, Tree]) -> list[int]:
    return [index for index in part if index not in known]


def _finish(pending: _Pending) -> ScoredBatch:
    """Waits for a batch and takes out the scores of its comparisons."""
    return ScoredBatch(
        indices=pending.dealt.members,
        scores=pending.dealt.take(pending.scores()),
        tokens=[tree.tokens for tree in pending.trees],
        truncation=[tree.truncation for tree in pending.trees],
        computed=pending.dealt.computed,
    )
