"""The users that a model knows: whose row of a table is which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import ScoredRow

GENERIC = 0
"""The row of everybody who is not in the table."""


@dataclass(frozen=True)
class Users:
    """The users of a table, in the order of its rows.

    Attributes:
      names: distinct user ids; ``names[i]`` has row i + 1.
    """

    names: tuple[str, ...]
    _rows: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = {name: row for row, name in enumerate(self.names, start=1)}
        if len(rows) < len(self.names):
            double = next(name for row, name in enumerate(self.names, start=1) if rows[name] != row)
            raise DataError(f"users: {quote(double)} is given twice; expected distinct user ids")
        object.__setattr__(self, "_rows", rows)

    @classmethod
    def of(cls, comparisons: Iterable[Comparison]) -> Users:
        """The users of these comparisons, sorted, so that the order of the data does not matter."""
        return cls(tuple(sorted({c.user_id for c in comparisons if c.user_id is not None})))

    @property
    def size(self) -> int:
        """Rows of the table, U + 1."""
        return len(self.names) + 1

    def rows(self, comparisons: Sequence[Comparison]) -> np.ndarray:
        """int32 [n]: the row of each comparison's user; the generic one for no user or an unknown one."""
        found = [GENERIC if c.user_id is None else self._rows.get(c.user_id, GENERIC) for c in comparisons]
        return np.asarray(found, np.int32)

    def unknown(self, comparisons: Iterable[Comparison | ScoredRow]) -> set[str]:
        """The users of these comparisons who are not in the table."""
        return {c.user_id for c in comparisons if c.user_id is not None and c.user_id not in self._rows}
