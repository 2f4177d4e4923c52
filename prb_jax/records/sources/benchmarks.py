"""The published records of a benchmark, from the hub, a folder or a file, as records of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prb_jax.errors import DataError
from prb_jax.records import benchmarks, fields
from prb_jax.records.benchmarks.benchmark import Benchmark, Place
from prb_jax.records.files import has_known_suffix
from prb_jax.records.lines import Row
from prb_jax.records.sources.folders import HubSource
from prb_jax.records.sources.source import Digest, FileSource, Source
from prb_jax.seams import get


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
        """As of the source within."""
        return self.inner.kind

    @property
    def _rule(self) -> Benchmark:
        return benchmarks.get_benchmark(str(self.benchmark))

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        rows = []
        for place, value in self._published(subset=subset, split=split):
            if not isinstance(value, dict):
                raise DataError(f"{place.where}: expected an object with fields, found {fields.found(value)}")
            rows.append(Row(place.where, dict(self._rule.record(value, place))))
        _tell_apart(rows)
        yield from rows

    def files(self, *, split: str) -> Sequence[Path]:
        """Return the files of a split, as any source does.

        Raises:
          DataError: a folder has none of the files that the benchmark is published in.
        """
        if self.kind != "folder":
            return self.inner.files(split=split)
        rule, folder = self._rule, Path(self.name)
        if rule.files is None:
            files = [self.inner.files(split=name) for name in rule.splits or (split,)]
            return list(dict.fromkeys(file for some in files for file in some))
        paths = sorted(path for path in folder.glob(rule.files) if has_known_suffix(path))
        named = f"files {rule.files}"
        if rule.topics:
            paths = [path for path in paths if path.name.partition(".")[0] in rule.topics]
            named += f" with the name of a topic ({', '.join(rule.topics[:3])}, ...)"
        if not paths:
            raise DataError(f"{folder}: no {named} in it; expected {rule.home} for {rule.name}")
        return paths

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

    def _published(self, *, subset: str | None, split: str) -> Iterator[tuple[Place, Any]]:
        inner = replace(self.inner, columns=None)
        if self.kind == "file" or (self.kind == "folder" and self._rule.files is not None):
            for file in self.files(split=split):
                name = file.as_posix() if self.kind == "file" else self._inside(file)
                rows = FileSource(str(file), columns=None).rows(subset=None, split=split)
                for number, row in enumerate(rows, start=1):
                    yield Place(row.where, name, "", number), row.value
            return
        splits = (split,) if self.kind == "prepared" else self._rule.splits or (split,)
        for name in splits:
            for number, row in enumerate(inner.rows(subset=subset, split=name), start=1):
                yield Place(row.where, "", name, number), row.value


def _tell_apart(rows: list[Row]) -> None:
    """Make the ids of the rows distinct; ids that are no names are left for the reader to refuse."""
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
