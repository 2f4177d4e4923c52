"""Scores a list of comparisons: tokenise, batch and dispatch ahead of the device.

A thread tokenises the next window while the device works on this one; batches are handed to the device
before the results of earlier ones are waited for. Of several processes each tokenises a part of a window, and
all get the whole, so that all plan the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.scoring.plan import (
    WINDOW,
    ShapeOptions,
    choose,
    plan_window,
    sample_indices,
    windows,
)
from prb_jax.scoring.scored import ScoredBatch
from prb_jax.scoring.tokenising import Encode, Part, encode_part, gather_parts
from prb_jax.trees.batches import PlannedBatch, TreeBatch, make_batch
from prb_jax.trees.buckets import Bucket
from prb_jax.trees.tree import Tree

IN_FLIGHT = 2
"""Batches given to the device and not yet read back: one that runs, one that waits."""

Dispatch = Callable[[TreeBatch], jax.Array]
Skip = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class _Pending:
    planned: PlannedBatch
    trees: list[Tree]
    scores: jax.Array


def stream_scores(
    comparisons: Sequence[Comparison],
    *,
    encode: Encode,
    dispatch: Dispatch,
    options: ShapeOptions,
    skip: Skip = lambda indices: False,
    divide: bool = True,
) -> Iterator[ScoredBatch]:
    """Scores every comparison once; batches come in the order of the plan.

    Args:
      comparisons: what to score.
      encode: comparisons to trees.
      dispatch: starts scoring a batch and returns its scores [B, K], not yet computed.
      options: how batches are shaped.
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
                return encode([comparisons[index] for index in indices])
            return encode_part(comparisons, indices, encode)

        buckets, known = _choose_buckets(len(comparisons), part_of, options, skip)
        wanted = [part for part in parts if not skip(part)]
        encoded: deque[Future[Part]] = deque()
        upcoming = iter(wanted)

        def prepare() -> None:
            part = next(upcoming, None)
            if part is not None:
                encoded.append(pool.submit(part_of, _missing(part, known)))

        try:
            prepare()
            for part in wanted:
                prepare()
                # Gathered here and not in the thread: all processes must start their collectives in one order.
                fresh = dict(
                    zip(_missing(part, known), gather_parts(encoded.popleft().result()), strict=True)
                )
                trees = [fresh[index] if index in fresh else known[index] for index in part]
                plan = plan_window(
                    [tree.shape for tree in trees],
                    buckets,
                    start=part.start,
                    options=options,
                    whole=len(parts) == 1,
                )
                for planned in plan:
                    if skip(planned.indices):
                        continue
                    rows = [trees[index - part.start] for index in planned.indices]
                    batch = make_batch(rows, planned.bucket, batch=planned.batch)
                    waiting.append(_Pending(planned, rows, dispatch(batch)))
                    while len(waiting) > IN_FLIGHT:
                        yield _finish(waiting.popleft())
            while waiting:
                yield _finish(waiting.popleft())
        finally:
            for future in encoded:
                future.cancel()


def _choose_buckets(
    count: int, part_of: Callable[[Sequence[int]], Part], options: ShapeOptions, skip: Skip
) -> tuple[Sequence[Bucket], dict[int, Tree]]:
    """Shapes from a sample, and the sample's trees, which need not be encoded again."""
    if skip(range(count)):
        return (), {}
    sample = sample_indices(count)
    trees = gather_parts(part_of(sample))
    # A sample speaks for the whole, so the number of compiles is weighed against all rows.
    repeat = max(1, min(count, WINDOW) // len(sample))
    chosen = choose([tree.shape for tree in trees] * repeat, options=options)
    return chosen.buckets, dict(zip(sample, trees, strict=True))


def _missing(part: range, known: Mapping[int, Tree]) -> list[int]:
    return [index for index in part if index not in known]


def _finish(pending: _Pending) -> ScoredBatch:
    """Waits for a batch and takes out the real rows and responses."""
    scores = np.asarray(pending.scores, np.float32)
    return ScoredBatch(
        indices=pending.planned.indices,
        scores=[scores[row, : len(tree.responses)].copy() for row, tree in enumerate(pending.trees)],
        tokens=[tree.tokens for tree in pending.trees],
        truncation=[tree.truncation for tree in pending.trees],
    )
