"""What a run needs of each comparison beside its text: its id, subset, user and labels, in compact columns.

Comparisons of large files are read once, by the process that tokenises them; the columns are then shared by all. The
scores of the baselines, which need the text, are taken on the same occasion."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from prb_jax import errors
from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, PrbError, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import Lists, Names
from prb_jax.processes.sharing import gather_int32, process_count, process_index
from prb_jax.scoring.baselines import BASELINES, score_baseline
from prb_jax.sources.large import LargeComparisons, Read, reach, shares

_AT_A_TIME: Final = 4096
_RANDOM: Final = "baseline:random"


@dataclass(frozen=True)
class Fact:
    """One comparison without its text.

    Attributes:
      id: of it; a digest of its contents where its record has none.
      named: whether its record has one.
      subset, user, labels, margin: of it.
      told: whether it says anything of its user: a name, a profile or hints.
      baselines: scores of its responses by each baseline.
    """

    id: str
    named: bool
    subset: str | None
    user: str | None
    labels: Sequence[float]
    margin: float | None
    told: bool
    baselines: Sequence[Sequence[float]]


class Facts:
    """The columns of a run's comparisons, in their order, as far as they were read.

    Args:
      comparisons: of the run. Those of a list are there at once; large ones are read by :meth:`advance`.
      baselines: whether the baselines score what is read.
    """

    def __init__(self, comparisons: Sequence[Comparison], *, baselines: bool = True) -> None:
        self._comparisons = comparisons
        self._text: Any = bytearray()
        self._starts: Any = array("q", [0])
        self._subsets, self._users = Names(), Names()
        self._labels = Lists()
        self._margins: Any = array("d")
        self._told: Any = array("B")
        self._baselines = [Lists() for _ in BASELINES]
        self._with_baselines = baselines
        self._noted: dict[int, Fact] = {}
        self._seen: dict[int, int] = {}  # 8 bytes of a digest of each id -> the first index
        self._lock = threading.Lock()
        if isinstance(comparisons, LargeComparisons):
            comparisons.listeners.append(self._note)
        else:
            for comparison in comparisons:
                self._append(fact_of(comparison, named=True, baselines=()))

    def __len__(self) -> int:
        """How many comparisons are known."""
        return len(self._starts) - 1

    def __bool__(self) -> bool:
        return True

    def id(self, index: int) -> str:
        """Return the id of a comparison; of equal records without one, the second has "ID#2"."""
        return bytes(self._text[self._starts[index] : self._starts[index + 1]]).decode()

    @property
    def ids(self) -> Sequence[str]:
        """The ids of all comparisons that are known."""
        return _Ids(self)

    def row(self, index: int, scores: Sequence[float], *, tokens: int = 0, truncated: Any = 0) -> ScoredRow:
        """Return the row of a comparison."""
        return ScoredRow(
            id=self.id(index),
            subset=self._subsets[index],
            user_id=self._users[index],
            scores=scores,
            labels=self._labels[index],
            tokens=tokens,
            truncated=truncated,
        )

    def labels(self, index: int) -> list[float]:
        """Return the labels of a comparison."""
        return self._labels[index]

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns as arrays, by their names in `prb_jax.trees.token_store.COLUMNS`."""
        return {
            "ids": np.frombuffer(bytes(self._text), np.uint8),
            "id_starts": np.asarray(self._starts, np.int64),
            "subsets": self._subsets.numbers(),
            "users": self._users.numbers(),
            "subset_names": _json_array(self._subsets.names),
            "user_names": _json_array(self._users.names),
            "labels": self._labels.values(),
            "told": np.asarray(self._told, np.uint8),
            "margins": np.asarray(self._margins, np.float64),
            "baselines": np.stack([scores.values() for scores in self._baselines]),
        }

    @classmethod
    def stored(cls, columns: Mapping[str, np.ndarray], *, comparisons: Sequence[Comparison]) -> Facts:
        """Return the facts that :meth:`columns` were of; all of them are known."""
        facts = cls([])
        facts._comparisons = comparisons
        facts._text, facts._starts = columns["ids"], columns["id_starts"]
        facts._subsets = Names.of(json.loads(columns["subset_names"].tobytes()), columns["subsets"])
        facts._users = Names.of(json.loads(columns["user_names"].tobytes()), columns["users"])
        starts, facts._margins = columns["response_starts"], columns["margins"]
        facts._told = columns["told"]
        facts._labels = Lists.of(columns["labels"], starts)
        facts._baselines = [Lists.of(scores, starts) for scores in columns["baselines"]]
        return facts

    def at(self, places: np.ndarray, *, comparisons: Sequence[Comparison]) -> Facts:
        """Return the facts of the comparisons at these places."""
        found = Facts([])
        found._comparisons = comparisons
        for place in places.tolist():
            scores = [column[place] for column in self._baselines]
            found._append(
                Fact(
                    self.id(place),
                    True,
                    self.subset(place),
                    self.user(place),
                    self.labels(place),
                    self.margin(place),
                    bool(self._told[place]),
                    scores,
                )
            )
        return found

    def told(self) -> int:
        """Return of how many comparisons the user is known, by a name, a profile or hints."""
        return int(np.asarray(self._told).sum(dtype=np.int64))

    def margin(self, index: int) -> float | None:
        """Return the margin of a comparison, if it has one."""
        value = float(self._margins[index])
        return None if math.isnan(value) else value

    def user(self, index: int) -> str | None:
        """Return the user of a comparison."""
        return self._users[index]

    def subset(self, index: int) -> str | None:
        """Return the subset of a comparison."""
        return self._subsets[index]

    def baselines(self) -> dict[str, Sequence[ScoredRow]]:
        """Return the rows of every baseline, in the order of the comparisons, all of which are known."""
        if not isinstance(self._comparisons, list):
            return {name: _BaselineRows(self, scores) for name, scores in zip(BASELINES, self._baselines)}
        return {
            name: [
                self.row(index, scores.tolist())
                for index, scores in enumerate(score_baseline(name, self._comparisons))
            ]
            for name in BASELINES
        }

    def advance(self, stop: int | None = None) -> None:
        """Make sure that the first comparisons are known, or all of them; a collective.

        Raises:
          DataError: a record that cannot be read, or an id that was used before, naming file and line.
        """
        while stop is None or len(self) < stop:
            start = len(self)
            end = start + _AT_A_TIME if stop is None else min(start + _AT_A_TIME, stop)
            indices = range(start, reach(self._comparisons, end))
            if not indices:
                return
            self.extend(_gathered(self._own_facts, indices))
            with self._lock:
                for index in [index for index in self._noted if index < len(self)]:
                    del self._noted[index]

    def extend(self, facts: Iterable[Fact]) -> None:
        """Add the facts of the next comparisons.

        Raises:
          DataError: an id that was used before, naming both places.
        """
        for fact in facts:
            self._check_id(fact)
            self._append(self._distinct(fact))

    def _own_facts(self, indices: range) -> list[tuple[int, Fact]]:
        """The facts that this process gives: of what it read already, and of its part of what nobody did."""
        assert isinstance(self._comparisons, LargeComparisons)
        with self._lock:
            noted = np.asarray(sorted(index for index in self._noted if index in indices), np.int32)
        owner = dict.fromkeys(indices, -1)
        for process, read in reversed(list(enumerate(gather_int32(noted)))):
            owner.update(dict.fromkeys(read.tolist(), process))
        unread = [index for index, process in owner.items() if process < 0]
        taken = list(shares(self._comparisons, unread)[process_index()])
        for index in taken:
            self._comparisons.read(index)
        own = sorted(taken + [index for index, process in owner.items() if process == process_index()])
        with self._lock:
            return [(index, self._noted[index]) for index in own]

    def _note(self, read: Read) -> None:
        if read.index < len(self):
            return
        scores = baseline_scores(read.comparison) if self._with_baselines else ()
        with self._lock:
            self._noted[read.index] = fact_of(read.comparison, named=read.named, baselines=scores)

    def _check_id(self, fact: Fact) -> None:
        before = self._seen.get(_short_digest(fact.id))
        if before is None or not fact.named or self.id(before) != fact.id:
            return
        assert isinstance(self._comparisons, LargeComparisons)
        where, first = self._comparisons.where(len(self)), self._comparisons.where(before)
        raise DataError(f"{where}: field 'id': {quote(fact.id)} was already used at {first}")

    def _distinct(self, fact: Fact) -> Fact:
        """The fact with an id of its own: of equal records without an id the second one is "ID#2"."""
        name, count = fact.id, 1
        while not fact.named and self._holds(name):
            count += 1
            name = f"{fact.id}#{count}"
        if name == fact.id:
            return fact
        if not fact.baselines:
            return replace(fact, id=name, named=True)
        assert isinstance(self._comparisons, LargeComparisons)
        row = {**self._comparisons.read(len(self)).comparison.to_row(), "id": name}
        renamed = Comparison.from_row(row, where="")
        scores = dict(zip(BASELINES, fact.baselines)) | {_RANDOM: _baseline(_RANDOM, [renamed])}
        return replace(fact, id=name, named=True, baselines=list(scores.values()))

    def _holds(self, name: str) -> bool:
        before = self._seen.get(_short_digest(name))
        return before is not None and self.id(before) == name

    def _append(self, fact: Fact) -> None:
        self._seen.setdefault(_short_digest(fact.id), len(self))
        self._text += fact.id.encode()
        self._subsets.append(fact.subset)
        self._users.append(fact.user)
        self._labels.append(fact.labels)
        self._told.append(fact.told)
        self._margins.append(math.nan if fact.margin is None else fact.margin)
        for column, scores in zip(self._baselines, fact.baselines):
            column.append(scores)
        self._starts.append(len(self._text))


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a comparison without its text; attributes as of `Comparison`."""

    id: str
    user_id: str | None
    subset: str | None
    labels: tuple[float, ...]
    margin: float | None


class KnownRows(Sequence[Known]):
    """Some of the comparisons of :class:`Facts`, made when they are asked for.

    Args:
      facts: of all of them.
      places: int64, which ones.
    """

    def __init__(self, facts: Facts, places: np.ndarray) -> None:
        self._facts, self._places = facts, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.at(np.arange(len(self))[index])
        facts, place = self._facts, int(self._places[range(len(self))[index]])
        return Known(
            facts.id(place),
            facts.user(place),
            facts.subset(place),
            tuple(facts.labels(place)),
            facts.margin(place),
        )

    def at(self, indices: np.ndarray) -> KnownRows:
        """Return the ones at these places."""
        return KnownRows(self._facts, self._places[indices])


class _Ids(Sequence[str]):
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._facts.id(each) for each in range(len(self))[index]]
        return self._facts.id(range(len(self))[index])


class _BaselineRows(Sequence[ScoredRow]):
    def __init__(self, facts: Facts, scores: Lists) -> None:
        self._facts, self._scores = facts, scores

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        place = range(len(self))[index]
        return self._facts.row(place, self._scores[place])


def fact_of(comparison: Comparison, *, named: bool, baselines: Sequence[Sequence[float]]) -> Fact:
    """Return the fact of one comparison."""
    one = comparison
    told = bool(one.profile) or one.user_id is not None or one.hints is not None
    return Fact(one.id, named, one.subset, one.user_id, one.labels or (), one.margin, told, baselines)


def baseline_scores(comparison: Comparison) -> list[list[float]]:
    """Return the scores of its responses by each baseline."""
    return [_baseline(name, [comparison]) for name in BASELINES]


def _baseline(name: str, one: Sequence[Comparison]) -> list[float]:
    return score_baseline(name, one)[0].tolist()


def _short_digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _gathered(own_facts: Callable[[range], list[tuple[int, Fact]]], indices: range) -> list[Fact]:
    """The facts of all processes, in the order of the indices; an error of one is raised in all."""
    if process_count() == 1:
        return [fact for _, fact in own_facts(indices)]
    try:
        value: Any = [[index, *fact.__dict__.values()] for index, fact in own_facts(indices)]
    except PrbError as error:
        value = {"error": [type(error).__name__, str(error)]}
    own = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)
    parts = [json.loads(part.astype(np.uint8).tobytes()) for part in gather_int32(own)]
    for process, part in enumerate(parts):
        if isinstance(part, Mapping):
            kind, text = part["error"]
            raise getattr(errors, kind)(text if process == process_index() else f"process {process}: {text}")
    found = sorted((values for part in parts for values in part), key=lambda values: values[0])
    return [Fact(*values) for _, *values in found]


def _json_array(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
