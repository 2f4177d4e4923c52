"""The published records of a benchmark, from the hub, a folder or a file, as records of ours."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prb_jax.errors import DataError, PrbWarning, listed
from prb_jax.records import benchmarks, fields
from prb_jax.records.benchmarks.benchmark import EVERY, Benchmark, Place, Published, Rows
from prb_jax.records.fields import RECORD_FIELDS
from prb_jax.records.files import Row, has_known_suffix
from prb_jax.records.sources.folders import HubSource
from prb_jax.records.sources.source import Digest, FileSource, Source
from prb_jax.seams import get


class _Watched(dict[str, Any]):
    """A published row that remembers the columns that are asked for, and those that it has."""

    def __init__(self, row: dict[str, Any], asked: set[str], found: set[str]) -> None:
        super().__init__(row)
        self._asked = asked
        found.update(row)

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)


def open_published(name: str) -> HubSource:
    """Return the data set of the hub that a benchmark is published in; DataError if it has none."""
    benchmark = benchmarks.get_benchmark(name)
    if benchmark.repository is None:
        raise DataError(
            f"{name}: has no data set on the hub; give --data {name}:FOLDER with {benchmark.home}"
        )
    return HubSource(benchmark.repository, benchmark=name)


@dataclass(frozen=True)
class BenchmarkSource(Source):
    """A benchmark, in the layout in which it is published or in the format of our records.

    Published ids are names within a subset. Where two records share one, every id is written as
    "SUBSET/ID", and the second record of an equal name as "SUBSET/ID#2".
    """

    inner: Source = field(kw_only=True)

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Kind of the inner source."""
        return self.inner.kind

    @property
    def _rule(self) -> Benchmark:
        return benchmarks.get_benchmark(str(self.benchmark))

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        published = self._published(subset=subset, split=split)
        if self._rule.records is None:
            rows = [Row(place.where, dict(self._rule.record(value, place))) for place, value in published]
            _tell_apart(rows)
            yield from rows
        else:
            yield from self._converted(published, split=split)

    def _converted(self, rows: Rows, *, split: str) -> Iterator[Row]:
        """The records that `Benchmark.records` makes of the rows, which may be records of ours already."""
        rule, first = self._rule, next(rows, None)
        if first is None:
            return
        rows = itertools.chain([first], rows)
        place, value = first
        lacking = [column for column in rule.columns if column not in value]
        others = value.keys() - set(RECORD_FIELDS)
        if lacking and ("chosen" in value or "responses" in value) and not others:
            yield from (Row(place.where, value) for place, value in rows)
            return
        if lacking:
            raise DataError(
                f"{place.where}: no record of {rule.name}: expected the columns {', '.join(rule.columns)}, found "
                f"{listed(list(map(str, value)), most=12) or 'none'}"
            )

        asked, found = set[str](), set[str]()

        def watched(rows: Rows) -> Rows:
            return ((place, _Watched(dict(value), asked, found)) for place, value in rows)

        def table(name: str) -> Rows:
            return watched(self._published(subset=None, split=split, table=name))

        assert rule.records is not None
        published = Published(watched(rows), split, table)
        try:
            yield from (Row(where, value) for where, value in rule.records(published))
        finally:
            counts = {"texts": +published.cleaned, "left out": +published.left_out}
            told = [
                f"{what}: {', '.join(f'{reason}: {count:,}' for reason, count in counter.items())}"
                for what, counter in counts.items()
                if counter
            ]
            if absent := sorted(asked - found):
                told.append(f"columns that no row has, read as empty: {listed(absent, most=8)}")
            if told:
                warnings.warn(f"{self.name}: {'; '.join(told)}", PrbWarning, stacklevel=2)

    def files(self, *, split: str) -> Sequence[Path]:
        """Return the files of a split, as any source does, and of all other tables that the benchmark reads.

        Raises:
          DataError: a folder has none of the files that the benchmark is published in.
        """
        others = self._rule.tables if self.kind == "folder" else ()
        return [*self._main_files(split), *(file for name in others for file in self._table(name))]

    def _main_files(self, split: str) -> Sequence[Path]:
        rule = self._rule
        if self.kind != "folder":
            return self.inner.files(split=split)
        if rule.files is None:
            files = [self.inner.files(split=name) for name in self._splits(split)]
            return list(dict.fromkeys(file for some in files for file in some))
        paths = self._matching(rule.files)
        named = f"files {rule.files}"
        if rule.topics:
            paths = [path for path in paths if path.name.partition(".")[0] in rule.topics]
            named += f" with the name of a topic ({', '.join(rule.topics[:3])}, ...)"
        if not paths:
            raise DataError(f"{self.name}: no {named} in it; expected {self._home} for {rule.name}")
        return paths

    def _table(self, name: str) -> Sequence[Path]:
        pattern = self._rule.tables[name]
        paths = self._matching(pattern) if self.kind == "folder" else []
        if not paths:
            raise DataError(
                f"{self.name}: {self._rule.name} also needs {pattern}: expected a folder with both, of {self._home}"
            )
        return paths

    def _matching(self, pattern: str) -> list[Path]:
        return sorted(path for path in Path(self.name).glob(pattern) if has_known_suffix(path))

    def _splits(self, split: str) -> Sequence[str]:
        splits = self._rule.splits
        return self.inner.splits(self._rule.config) if splits == EVERY else splits or (split,)

    @property
    def _home(self) -> str:
        rule = self._rule
        return rule.home or f"a copy of huggingface.co/datasets/{rule.repository}"

    @property
    def tokens(self) -> Path | None:
        return self.inner.tokens

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        if self.kind == "folder":
            files = {self._inside(file): digest(file) for file in sorted(self.files(split=split))}
            described: dict[str, Any] = {"split": split, "files": files}
        else:
            described = self.inner.describe(split=split, digest=digest)
        if self.kind == "prepared":
            return described
        mark = {"benchmark": self.benchmark}
        if self.benchmark not in benchmarks.NAMES:
            mark["plugin"] = get("benchmarks", str(self.benchmark)).origin
        return {"kind": self.kind, **mark, **described}

    def _published(self, *, subset: str | None, split: str, table: str | None = None) -> Rows:
        """The rows of the main table, or of another one, each an object."""
        for place, value in self._placed(subset=subset, split=split, table=table):
            if not isinstance(value, dict):
                raise DataError(f"{place.where}: expected an object with fields, found {fields.found(value)}")
            yield place, value

    def _placed(self, *, subset: str | None, split: str, table: str | None) -> Iterator[tuple[Place, Any]]:
        inner = replace(self.inner, columns=None)
        by_path = self.kind == "folder" and (table is not None or self._rule.files is not None)
        if by_path or self.kind == "file":
            for file in self._main_files(split) if table is None else self._table(table):
                name = file.as_posix() if self.kind == "file" else self._inside(file)
                rows = FileSource(str(file), columns=None).rows(subset=None, split=split)
                for number, row in enumerate(rows, start=1):
                    yield Place(row.where, name, "", number), row.value
            return
        yield from self._by_split(inner, table or self._rule.config or subset, split)

    def _by_split(self, inner: Source, config: str | None, split: str) -> Iterator[tuple[Place, Any]]:
        """Yield the rows of a config, numbered within splits; an error of the hub also names the home of the data."""
        try:
            for name in (split,) if self.kind == "prepared" else self._splits(split):
                for number, row in enumerate(inner.rows(subset=config, split=name), start=1):
                    yield Place(row.where, "", name, number), row.value
        except DataError as error:
            if self.kind != "hub":
                raise
            licence = f" (licence: {self._rule.licence})" if self._rule.licence else ""
            raise DataError(
                f"{error}; {self._rule.name} is published as {self._home.removeprefix('a copy of ')}{licence}: "
                f"--data {self._rule.name}:FOLDER reads a copy"
            ) from error


def _tell_apart(rows: list[Row]) -> None:
    """Make the ids of the rows distinct; the reader raises an error for invalid ids."""
    named = [row.value for row in rows if isinstance(row.value.get("id"), str | int)]
    if len({str(value["id"]) for value in named}) == len(named):
        return
    seen: Counter[str] = Counter()
    for value in named:
        name = str(value["id"])
        if value.get("subset") is not None:
            name = f"{value['subset']}/{name}"
        seen[name] += 1
        value["id"] = name if seen[name] == 1 else f"{name}#{seen[name]}"
