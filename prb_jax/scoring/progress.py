"""Progress of a run's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.records.items import Items
from prb_jax.runs.progress import Count, show_progress


@contextlib.contextmanager
def show_rows(
    label: str, comparisons: Items[Any], *, done: int, enabled: bool
) -> Iterator[Callable[[Sequence[ScoredRow]], None]]:
    """Show the progress of scoring; yield a function that adds the rows of a batch.

    Args:
      label: Name of the run.
      comparisons: Comparisons to score, whose number is an estimate until all files are read.
      done: Number of rows that earlier sessions finished.
      enabled: If False, only messages are shown.
    """
    count = Count(0, done)

    def estimate() -> None:
        count.about, count.total = not comparisons.complete, round(comparisons.about())

    estimate()
    with show_progress(label, count, enabled=enabled) as display:

        def show(rows: Sequence[ScoredRow]) -> None:
            estimate()
            display.advance(len(rows), sum(row.tokens for row in rows))

        yield show
