"""Scores a list of comparisons: tokenise, batch and dispatch ahead of the device.

A thread tokenises the next window while the device works on this one; batches are handed to the device
before the results of earlier ones are waited for. Of several processes each tokenises a part of a window, and
all get the whole, so that all deal the same batches. Windows and shapes depend on the whole input and on the
options alone, not on what is already scored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.scoring.dealing import Batch, Dealer, Dealt, dealer_of
from prb_jax.scoring.scored import ScoredBatch
from prb_jax.scoring.tokenising import Encode, Part, encode_part, encode_pieces, gather_parts
from prb_jax.trees.packing import StreamOptions
from prb_jax.trees.shapes import ShapeOptions
from prb_jax.trees.tree import Tree

FIRST_WINDOW = 512
"""Comparisons of the first window: few, so that the device starts early."""

WINDOW = 4096
"""Comparisons of the later windows: many, so that few batches are left partly filled at their ends."""

IN_FLIGHT = 2
"""Batches given to the device and not yet read back: one that runs, one that waits."""

Dispatch = Callable[[Batch], jax.Array]
Skip = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class _Pending:
    dealt: Dealt
    trees: list[Tree]
    scores: jax.Array


def windows(count: int) -> list[range]:
    """The input in consecutive parts; each is tokenised while the one before it is scored."""
    starts = [0, *range(FIRST_WINDOW, count, WINDOW)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], count]) if start < stop]


def stream_scores(
    comparisons: Sequence[Comparison],
    *,
    encode: Encode,
    dispatch: Dispatch,
    options: ShapeOptions | StreamOptions,
    skip: Skip = lambda indices: False,
    divide: bool = True,
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

    Raises:
      PrbError: as `encode`.
    """
    if not comparisons:
        return
    parts = windows(len(comparisons))
    waiting: deque[_Pending] = deque()
    # One thread: tokenizers use threads of their own, and two windows at once would only take turns.
    with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as pool:

        def part_of(indices: Sequence[int]) -> Part:
            if not divide:
                return encode_pieces(comparisons, indices, encode)
            return encode_part(comparisons, indices, encode)

        dealer = dealer_of(options)
        known = _choose_shapes(dealer, parts, part_of, skip)
        upcoming = (part for part in parts if not skip(part))  # asked for one after another
        encoded: deque[tuple[range, Future[Part]]] = deque()

        def prepare() -> None:
            part = next(upcoming, None)
            if part is not None:
                encoded.append((part, pool.submit(part_of, _missing(part, known))))

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
                    waiting.append(_Pending(dealt, members, dispatch(dealt.make())))
                    while len(waiting) > IN_FLIGHT:
                        yield _finish(waiting.popleft())
            while waiting:
                yield _finish(waiting.popleft())
        finally:
            for _, future in encoded:
                future.cancel()


def _choose_shapes(
    dealer: Dealer, parts: Sequence[range], part_of: Callable[[Sequence[int]], Part], skip: Skip
) -> dict[int, Tree]:
    """Let the dealer choose shapes from a sample; returns the sample's trees, which need not be encoded again."""
    count = parts[-1].stop
    if skip(range(count)):
        return {}
    sample = dealer.sample(count, parts[0])
    trees = gather_parts(part_of(sample))
    dealer.begin(trees, count=min(count, WINDOW), windows=len(parts))
    return dict(zip(sample, trees, strict=True))


def _missing(part: range, known: Mapping[int, Tree]) -> list[int]:
    return [index for index in part if index not in known]


def _finish(pending: _Pending) -> ScoredBatch:
    """Waits for a batch and takes out the scores of its comparisons."""
    return ScoredBatch(
        indices=pending.dealt.members,
        scores=pending.dealt.take(np.asarray(pending.scores, np.float32)),
        tokens=[tree.tokens for tree in pending.trees],
        truncation=[tree.truncation for tree in pending.trees],
        computed=pending.dealt.computed,
    )
