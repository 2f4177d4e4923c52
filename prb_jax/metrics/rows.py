"""Scored rows, and millions of them: stored as columns of numbers; row objects are created on access."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, Final, overload

import numpy as np

from prb_jax.errors import short_repr

_CUTS: Final = ("posts_dropped", "prompt_tokens_dropped", "response_tokens_dropped")


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One comparison with its scores, as a line of ``scores.jsonl``."""

    id: str  # id of the comparison
    subset: str | None  # subset of the comparison, or None
    user_id: str | None  # user of the comparison, or None
    scores: Sequence[float]  # [K] rewards; for a graded row, the grade
    labels: Sequence[float]  # [K] numbers, higher is better, not all equal; [1.0] for a graded row
    tokens: int = 0  # number of tokens that the model read for this row
    # how much of the text was cut: a count, or counts by kind (posts, tokens)
    truncated: int | Mapping[str, int] = 0

    __repr__ = short_repr

    @property
    def is_graded(self) -> bool:
        """Whether the row is one response with a grade, read from another harness's log."""
        return len(self.scores) == 1

    @property
    def is_truncated(self) -> bool:
        """Whether anything of the row was cut."""
        if isinstance(self.truncated, Mapping):
            return any(self.truncated.values())
        return bool(self.truncated)


class Names:
    """Names shared by many rows, each stored once."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}
        self.names: list[str | None] = []
        self._rows: Any = array("i")

    @classmethod
    def of(cls, names: Sequence[str | None], rows: np.ndarray) -> Names:
        """Return the names of rows that are already numbered."""
        table = cls()
        table.names, table._rows = list(names), rows
        return table

    def numbers(self) -> np.ndarray:
        """Return the index of each row's name in ``names``, int32."""
        return np.asarray(self._rows, np.int32)

    def append(self, name: str | None) -> None:
        """Add the name of the next row."""
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        self._rows.append(number)

    def __getitem__(self, row: int) -> str | None:
        return self.names[self._rows[row]]


class Lists:
    """A list of numbers for each row."""

    def __init__(self) -> None:
        self._values: Any = array("d")
        self._starts: Any = array("q", [0])

    @classmethod
    def of(cls, values: np.ndarray, starts: np.ndarray) -> Lists:
        """Return consecutive lists stored in one array."""
        lists = cls()
        lists._values, lists._starts = values, starts
        return lists

    def values(self) -> np.ndarray:
        """Return all lists concatenated, float64."""
        return np.asarray(self._values, np.float64)

    def append(self, values: Iterable[float]) -> None:
        """Add the list of the next row."""
        self._values.extend(values)
        self._starts.append(len(self._values))

    def __getitem__(self, row: int) -> list[float]:
        return self._values[self._starts[row] : self._starts[row + 1]].tolist()


class RowTable(MutableMapping[str, ScoredRow]):
    """Rows by id, in insertion order; a million pairs use about 250 MB."""

    def __init__(self, rows: Iterable[ScoredRow] = ()) -> None:
        self._numbers: dict[str, int] = {}
        self._subsets, self._users = Names(), Names()
        self._scores, self._labels = Lists(), Lists()
        self._tokens, self._cuts = array("q"), array("q")
        self._odd: dict[int, ScoredRow] = {}  # rows that do not fit the columns
        self.update((row.id, row) for row in rows)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def place(self, name: str) -> int | None:
        """Return how many rows precede this one; None if it is missing."""
        return self._numbers.get(name)

    def __getitem__(self, name: str) -> ScoredRow:
        row = self._numbers[name]
        if row in self._odd:
            return self._odd[row]
        cuts = self._cuts[3 * row : 3 * row + 3]
        return ScoredRow(
            id=name,
            subset=self._subsets[row],
            user_id=self._users[row],
            scores=self._scores[row],
            labels=self._labels[row],
            tokens=self._tokens[row],
            truncated=dict(zip(_CUTS, cuts)) if any(cuts) else 0,
        )

    def __setitem__(self, name: str, row: ScoredRow) -> None:
        number = self._numbers.get(name)
        if number is not None:
            if self[name] != row:
                self._odd[number] = row
            return
        number = self._numbers[name] = len(self._tokens)
        self._subsets.append(row.subset)
        self._users.append(row.user_id)
        cut = row.truncated if isinstance(row.truncated, Mapping) else {}
        self._cuts.extend(cut.get(kind, 0) for kind in _CUTS)
        self._scores.append(row.scores)
        self._labels.append(row.labels)
        self._tokens.append(row.tokens)
        if self[name] != row:
            self._odd[number] = row

    def __delitem__(self, name: str) -> None:
        raise TypeError("a scored row cannot be deleted")


class RowView(Sequence[ScoredRow]):
    """The rows of a table, ordered by a list of ids."""

    def __init__(self, table: Mapping[str, ScoredRow], ids: Sequence[str]) -> None:
        self._table, self._ids = table, ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> ScoredRow: ...
    @overload
    def __getitem__(self, index: slice) -> RowView: ...
    def __getitem__(self, index: int | slice) -> ScoredRow | RowView:
        if isinstance(index, slice):
            return RowView(self._table, self._ids[index])
        return self._table[self._ids[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]
