"""Ids and labels of a run's comparisons by index: what a row has beside its scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Items
from prb_jax.seams import get


class ComparisonTable:
    """The comparisons of a run in memory; `prb_jax.scoring.large_table.LargeTable` has columns without texts."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self._comparisons = comparisons

    def __len__(self) -> int:
        """Return the number of comparisons read so far."""
        return len(self._comparisons)

    def id(self, index: int) -> str:
        """Return the id of a comparison."""
        return self._comparisons[index].id

    @cached_property
    def ids(self) -> Sequence[str]:
        """Ids of all comparisons read so far."""
        return [one.id for one in self._comparisons]

    @cached_property
    def labels(self) -> Any:
        """Labels of each comparison, by its index."""
        return [list(one.labels or ()) for one in self._comparisons]

    def row(self, index: int, scores: Sequence[float], *, tokens: int = 0, truncated: Any = 0) -> ScoredRow:
        """Return the row of a comparison with its scores."""
        one = self._comparisons[index]
        return ScoredRow(one.id, one.subset, one.user_id, scores, self.labels[index], tokens, truncated)

    def told(self) -> int:
        """Return the number of comparisons with user information: a user id, a profile or hints."""
        return sum(one.has_user_info for one in self._comparisons)

    def advance(self, stop: int) -> None:
        """Read the comparisons before index `stop`; those in memory are read."""

    def complete(self) -> None:
        """Read all comparisons and warn of duplicates; those in memory are read."""


def table_of(comparisons: Items[Comparison]) -> ComparisonTable:
    """Return the table of a run's comparisons; those larger than memory enter it on their first read."""
    if comparisons.in_memory:
        return ComparisonTable(comparisons)
    return get("large data", "table").value(comparisons)
