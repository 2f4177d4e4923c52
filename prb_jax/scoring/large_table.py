"""Compact columns of the comparisons of data larger than memory, without their text: ids, subsets, users and labels.

Comparisons of large files are entered on their first read; baselines, which need the text, are scored at the same time.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.rows import Lists, Names, ScoredRow
from prb_jax.platform.processes.sharing import process_index
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
from prb_jax.records.items import Held, Items
from prb_jax.records.remarks import RenderedPrompts, tell_alike, tell_equal
from prb_jax.scoring.inputs import ComparisonTable
from prb_jax.seams import get

Baselines = Mapping[str, Callable[[Sequence[Comparison]], list[np.ndarray]]]


@dataclass(frozen=True, slots=True)
class TableRow:
    """A stored comparison, without its text."""

    id: str
    subset: str | None
    user_id: str | None
    labels: Sequence[float]
    margin: float | None
    has_user_info: bool  # see `Comparison.has_user_info`


class LargeTable(ComparisonTable):
    """Columns of a run's comparisons that were read so far, in their order.

    Args:
      comparisons: Comparisons of the run. Those of large files are entered on their first read, others at once.
      baselines: If True, the first process also scores each comparison of a large file with the baselines.

    Attributes:
      subsets, users, labels: Values of each comparison, by its index.
    """

    def __init__(self, comparisons: Items[Comparison], *, baselines: bool = True) -> None:
        self._comparisons = comparisons
        self._text: Any = bytearray()
        self._starts: Any = array("q", [0])
        self.subsets, self.users, self.labels = Names(), Names(), Lists()
        self._margins: Any = array("d")
        self._told: Any = array("B")
        self._scorers: Baselines = get("tables", "baselines").value
        self._baselines = [Lists() for _ in self._scorers]
        self._with_baselines = baselines and process_index() == 0
        self._unnamed = self._again = 0  # numbers of records without an id, and of duplicates among them
        self._example = ""  # id of a duplicate
        self._rendered = RenderedPrompts()
        self._seen: dict[int, int] = {}  # 8-byte digest of an id -> its first index
        self._lock = threading.Lock()
        self._where = comparisons.listen(self._enter)
        if self._where is None:
            for comparison in comparisons:
                self.append(comparison)

    def __len__(self) -> int:
        """Return the number of comparisons read so far."""
        return len(self._starts) - 1

    def id(self, index: int) -> str:
        """Return the id of a comparison."""
        return bytes(self._text[self._starts[index] : self._starts[index + 1]]).decode()

    @property
    def ids(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Lazy(self.__len__, self.id)

    def row(self, index: int, scores: Sequence[float], *, tokens: int = 0, truncated: Any = 0) -> ScoredRow:
        """Return the row of a comparison with its scores."""
        labels, subset, user = self.labels[index], self.subsets[index], self.users[index]
        return ScoredRow(self.id(index), subset, user, scores, labels, tokens, truncated)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns as arrays, by their names in `prb_jax.trees.token_store.COLUMNS`."""
        return {
            "ids": np.frombuffer(bytes(self._text), np.uint8),
            "id_starts": np.asarray(self._starts, np.int64),
            "subsets": self.subsets.numbers(),
            "users": self.users.numbers(),
            "subset_names": np.frombuffer(json.dumps(self.subsets.names).encode(), np.uint8),
            "user_names": np.frombuffer(json.dumps(self.users.names).encode(), np.uint8),
            "labels": self.labels.values(),
            "told": np.asarray(self._told, np.uint8),
            "margins": np.asarray(self._margins, np.float64),
            "baselines": np.stack([scores.values() for scores in self._baselines]),
        }

    @classmethod
    def stored(cls, columns: Mapping[str, np.ndarray]) -> LargeTable:
        """Return the complete table from its :meth:`columns` (and `response_starts` of the store)."""
        table = cls(Held())
        table._text, table._starts = columns["ids"], columns["id_starts"]
        table.subsets = Names.of(json.loads(columns["subset_names"].tobytes()), columns["subsets"])
        table.users = Names.of(json.loads(columns["user_names"].tobytes()), columns["users"])
        starts, table._margins = columns["response_starts"], columns["margins"]
        table._told = columns["told"]
        table.labels = Lists.of(columns["labels"], starts)
        table._baselines = [Lists.of(scores, starts) for scores in columns["baselines"]]
        return table

    def at(self, places: np.ndarray) -> LargeTable:
        """Return the table of the comparisons at these indices."""
        table = LargeTable(Held())
        for place in places.tolist():
            table.append(self[place], [column[place] for column in self._baselines])
        return table

    def __getitem__(self, index: int) -> TableRow:
        """Return the row of a comparison, without the scores of the baselines."""
        margin = float(self._margins[index])
        return TableRow(
            self.id(index),
            self.subsets[index],
            self.users[index],
            tuple(self.labels[index]),
            None if math.isnan(margin) else margin,
            bool(self._told[index]),
        )

    def told(self) -> int:
        """Return the number of comparisons with user information: a user id, a profile or hints."""
        return int(np.asarray(self._told).sum(dtype=np.int64))

    def baselines(self) -> dict[str, Sequence[ScoredRow]]:
        """Return the rows of every baseline, in the order of the comparisons; all must have been read."""
        if self._where is None:  # comparisons in memory are not scored on entry
            for score, column in zip(self._scorers.values(), self._baselines):
                for scores in score(self._comparisons):
                    column.append(scores.tolist())
            self._comparisons = Held()
        return {
            name: Lazy(self.__len__, lambda index, column=column: self.row(index, column[index]))
            for name, column in zip(self._scorers, self._baselines)
        }

    def advance(self, stop: int) -> None:
        """Read the comparisons before index `stop`.

        Raises:
          DataError: A record cannot be read, or its id was used before; the message names file and line.
        """
        if len(self) < stop:
            self._comparisons[stop - 1]  # pyright: ignore[reportUnusedExpression] - reading enters it

    def complete(self) -> None:
        """Read all comparisons and warn of duplicates; errors as in :meth:`advance`."""
        if len(self) < len(self._comparisons):
            for _ in self._comparisons:
                pass
        tell_equal(self._again, unnamed=self._unnamed, example=self._example)
        if self._where is not None:
            tell_alike(name for name in self.users.names if name is not None)
        self._rendered.tell()
        self._unnamed = self._again = 0

    def append(self, one: Comparison | TableRow, baselines: Sequence[Sequence[float]] = ()) -> None:
        """Add the next comparison with its scores by each baseline, if any; its id must be new."""
        self._seen.setdefault(_short_digest(one.id), len(self))
        self._text += one.id.encode()
        self.subsets.append(one.subset)
        self.users.append(one.user_id)
        self.labels.append(one.labels or ())
        self._told.append(one.has_user_info)
        self._margins.append(math.nan if one.margin is None else one.margin)
        for column, scores in zip(self._baselines, baselines):
            column.append(scores)
        self._starts.append(len(self._text))  # last, because another thread may read

    def _enter(self, index: int, placed: Row[Comparison]) -> None:
        with self._lock:
            if index != len(self):
                return
            name = placed.value.id
            before = self._seen.get(_short_digest(name))
            if before is not None and self.id(before) == name:
                assert self._where is not None  # only comparisons of files are entered here
                first = self._where(before)
                raise DataError(f"{placed.where}: field 'id': {quote(name)} was already used at {first}")
            self._rendered.look_at(placed)
            self._unnamed += not placed.named
            if not placed.named and "#" in name:
                self._again, self._example = self._again + 1, self._example or name
            scorers = self._scorers if self._with_baselines else {}
            self.append(placed.value, scored_by(scorers, placed.value))


def scored_by(baselines: Baselines, comparison: Comparison) -> list[list[float]]:
    """Return the scores of a comparison by each baseline."""
    return [score([comparison])[0].tolist() for score in baselines.values()]


class Lazy(Sequence[Any]):
    """Sequence that computes each value on access."""

    def __init__(self, count: Callable[[], int], get: Callable[[int], Any]) -> None:
        self._count, self._get = count, get

    def __len__(self) -> int:
        return self._count()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._get(place) for place in range(len(self))[index]]
        return self._get(range(len(self))[index])


def _short_digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
