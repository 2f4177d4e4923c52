"""The published records of a benchmark, from the hub, a folder or a file, as records of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prb_jax.benchmarks.benchmark import Benchmark, Place
from prb_jax.data import fields
from prb_jax.data.files import Row, has_known_suffix, read_rows
from prb_jax.data.folders import folder_files, read_folder
from prb_jax.data.hub import read_hub
from prb_jax.errors import DataError
from prb_jax.sources.prepared import is_prepared, read_prepared


def read_benchmark(benchmark: Benchmark, source: str | Path, *, subset: str | None, split: str) -> list[Row]:
    """All records of a benchmark, in the format of ``Comparison.from_row``.

    Published ids are names within a subset. Where two records share one, every id is written as
    "SUBSET/ID", and the second record of an equal name as "SUBSET/ID#2".

    Args:
      benchmark: what is read.
      source: a hub id; or, as ``Path``, a folder or file in the published layout, in the format of
        our records, or a prepared folder.
      subset: may be used to read less; the caller still has to choose by the records' own subset.
      split: for a benchmark that names none.

    Raises:
      DataError: for a source or record that cannot be read, or is not of this benchmark.
    """
    rows = []
    for place, value in _published(benchmark, source, subset=subset, split=split):
        if not isinstance(value, dict):
            raise DataError(f"{place.where}: expected an object with fields, found {fields.found(value)}")
        rows.append(Row(place.where, dict(benchmark.record(value, place))))
    _tell_apart(rows)
    return rows


def _published(
    benchmark: Benchmark, source: str | Path, *, subset: str | None, split: str
) -> Iterator[tuple[Place, Any]]:
    if isinstance(source, Path) and source.is_dir() and is_prepared(source):
        for number, row in enumerate(read_prepared(source, split=split), start=1):
            yield Place(row.where, "", split, number), row.value
    elif isinstance(source, Path) and not source.is_dir():
        yield from _file(source, source.as_posix())
    elif isinstance(source, Path) and benchmark.files is not None:
        for path in benchmark_files(benchmark, source, split=split):
            yield from _file(path, path.relative_to(source).as_posix())
    else:
        for name in benchmark.splits or (split,):
            if isinstance(source, Path):
                rows = read_folder(source, subset=subset, split=name, columns=None)
            else:
                rows = read_hub(source, subset=subset, split=name, columns=None)
            for number, row in enumerate(rows, start=1):
                yield Place(row.where, "", name, number), row.value


def benchmark_files(benchmark: Benchmark, folder: Path, *, split: str) -> list[Path]:
    """The files of a folder that are read for a benchmark, and what declares them.

    Raises:
      DataError: if there are none.
    """
    if benchmark.files is None:
        files = [folder_files(folder, split=name) for name in benchmark.splits or (split,)]
        return list(dict.fromkeys(file for some in files for file in some))
    paths = sorted(path for path in folder.glob(benchmark.files) if has_known_suffix(path))
    named = f"files {benchmark.files}"
    if benchmark.topics:
        paths = [path for path in paths if path.name.partition(".")[0] in benchmark.topics]
        named += f" with the name of a topic ({', '.join(benchmark.topics[:3])}, ...)"
    if not paths:
        raise DataError(f"{folder}: no {named} in it; expected {benchmark.home} for {benchmark.name}")
    return paths


def _file(path: Path, name: str) -> Iterator[tuple[Place, Any]]:
    for number, row in enumerate(read_rows(path, columns=None), start=1):
        yield Place(row.where, name, "", number), row.value


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
