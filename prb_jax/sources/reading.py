"""Comparisons by name: a file, a folder, a benchmark or data set of the hub, or the generated benchmark."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from prb_jax import benchmarks
from prb_jax.benchmarks.benchmark import Benchmark
from prb_jax.data import blocks
from prb_jax.data.arrow import parquet_rows
from prb_jax.data.comparison import Comparison
from prb_jax.data.field_names import RECORD, FieldMapper, FieldNames
from prb_jax.data.files import SUFFIXES, Row, file_digest, has_known_suffix, read_rows
from prb_jax.data.folders import folder_files, folder_layout, read_folder
from prb_jax.data.hub import read_hub, same_subset
from prb_jax.data.lines import JsonLines
from prb_jax.data.records import Placed, Records, given_rows, read_records
from prb_jax.errors import DataError, PrbError, quote
from prb_jax.plugins import get_plugin, is_python_value, python_value
from prb_jax.sources.benchmarks import benchmark_files, read_benchmark
from prb_jax.sources.large import SUFFIXES as LARGE_SUFFIXES
from prb_jax.sources.large import LargeComparisons, is_large, stamp, unpacked_size
from prb_jax.sources.prepared import (
    PreparedComparisons,
    is_prepared,
    metadata,
    read_prepared,
    source_description,
    tokens_folder,
)
from prb_jax.storage.urls import localised

PERSONAS: Final = "personas"
PRB: Final = "prb"

_COLUMNS: Final = re.compile(r"(?P<source>.+)\?(?P<columns>\w+=[^&=?]+(&\w+=[^&=?]+)*)", re.DOTALL)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _Kind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    PREPARED = "prepared"
    HUB = "hub"
    GENERATED = "generated"
    PYTHON = "python"


@dataclass(frozen=True)
class _Source:
    """A resolved source; ``name`` is a path, a hub id, or the part of the generated benchmark.

    ``benchmark`` is the name of the benchmark that it holds, if it holds one; ``columns`` are those of other names.
    """

    kind: _Kind
    name: str
    benchmark: str | None = None
    columns: FieldNames = RECORD


def read_comparisons(
    source: str | Path | Records, *, subset: str | None = None, split: str = "test", limit: int | None = None
) -> list[Comparison]:
    """Read and check labelled comparisons.

    Args:
      source: one of
        a file: .jsonl, .json (JSON lines or one array), .csv, all also .gz, or .parquet;
        a folder in the layout of a hub data set, or one that ``prb prepare`` wrote;
        a benchmark of ``prb_jax.benchmarks`` by its name or hub id ("prb" is the paper's), or, as
        "NAME:PATH", a folder or file of it; or another hub id;
        "personas" or "personas:PART", the generated benchmark;
        "FILE.py:NAME", a function of a Python file that returns records, or the records;
        or the records themselves: see ``prb_jax.data.records.Records``.
        A name may end in "?FIELD=COLUMN&...", for data whose columns have other names ("votes.csv?user_id=voter").
      subset: keep only this subset; for the paper's data set long or short ("Art").
      split: of a folder, a hub data set, or the generated benchmark if it is named without a part;
        benchmarks but the paper's are read from the split that they are published in.
      limit: keep only the first so many (of the subset). A file is not read further.

    Returns:
      At least one comparison, in the order of the source, with distinct ids.

    Raises:
      DataError: for a source that does not exist, cannot be read or holds nothing, and for the
        first bad record, naming file, line and field.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit: expected at least 1, found {limit}")
    if isinstance(source, str | Path):
        records = read_records(each_row(source, subset=subset, split=split))
    else:
        source, records = "data", read_records(given_rows(source))
    return [placed.comparison for placed in _chosen(_distinct(records), source, subset=subset, limit=limit)]


def _chosen(
    records: Iterable[Placed], source: object, *, subset: str | None, limit: int | None
) -> Iterator[Placed]:
    """The first so many comparisons of a subset; at least one."""
    taken, others = 0, set[str]()
    for placed in records:
        if subset is not None and not same_subset(placed.comparison.subset, subset):
            others.add(placed.comparison.subset or "(none)")
            continue
        yield placed
        taken += 1
        if taken == limit:
            return
    if not taken and others:
        raise DataError(f"{source}: no subset {quote(subset)}; expected one of {', '.join(sorted(others))}")
    if not taken:
        raise DataError(f"{source}: no comparisons in it")


def open_comparisons(
    source: str | Path, *, subset: str | None = None, split: str = "test", limit: int | None = None
) -> list[Comparison] | LargeComparisons:
    """As ``read_comparisons``, but comparisons of large files are read forward when they are asked for.

    JSON lines, also ``.gz``, parquet files and prepared folders of more than ``prb_jax.data.blocks.LARGE`` bytes are
    large. Their records are checked when they are read, and distinct ids are left to the caller.

    Raises:
      DataError: as ``read_comparisons``.
    """
    files = large_files(source, split=split)
    if not files:
        return read_comparisons(source, subset=subset, split=split, limit=limit)
    if limit is not None and limit < 1:
        raise DataError(f"limit: expected at least 1, found {limit}")
    resolved, stamped = _resolve(source, split=split), stamp(files)
    prepared = resolved.kind is _Kind.PREPARED
    readers = {} if prepared else {file: JsonLines(file) for file in files if file.suffix != ".parquet"}
    mapper = FieldMapper(resolved.columns, resolved.name)

    def rows() -> Iterator[Row]:
        if prepared:
            yield from read_prepared(Path(resolved.name), split=split)
            return
        for file in files:
            plain = readers[file].rows() if file in readers else read_rows(file, columns=resolved.columns)
            for row in plain:
                yield Row(row.where, mapper(row.value, where=row.where))
        mapper.finish()

    def about() -> float:
        counts = [reader.about() for reader in readers.values()]
        known = len(counts) == len(files) and all(counts) and subset is None
        return min(sum(counts), limit or math.inf) if known else 0.0

    count = None
    if subset is None and not readers:
        if prepared:
            count = len(PreparedComparisons(Path(resolved.name), split=split))
        else:
            count = sum(map(parquet_rows, files))
        count = min(count, limit or count)
    large = LargeComparisons(
        lambda: _chosen(read_records(rows(), tell=False), source, subset=subset, limit=limit),
        about=about,
        files={file: reader for file, reader in readers.items() if is_large(file)},
        stamp=stamped,
        count=count,
    )
    assert large  # or an error
    return large


def find_comparisons(
    source: str | Path, *, subset: str | None = None, split: str = "train", limit: int | None = None
) -> list[Comparison] | PreparedComparisons:
    """As ``read_comparisons``, for comparisons that are looked up in any order.

    Those of a large prepared folder stay on the disk: it is given whole, and subset and limit are left to the caller.

    Raises:
      DataError: as ``read_comparisons``; raw files that are too large to be held in memory.
    """
    files, path = large_files(source, split=split), Path(_resolve(source, split=split).name)
    if files and is_prepared(path):
        return PreparedComparisons(path, split=split)
    if sum(map(unpacked_size, files)) > blocks.HELD:
        raise DataError(
            f"{source}: too large to be held in memory, and records of raw files are not looked up one by one: run "
            f"`prb prepare --data {source} --split {split} --out DIR` once, and give DIR in its place"
        )
    return read_comparisons(source, subset=subset, split=split, limit=limit)


def each_comparison(source: str, *, split: str) -> Iterator[Comparison]:
    """The comparisons that ``read_comparisons`` gives, one after another; of large files one is held at a time.

    Raises:
      DataError: as ``read_comparisons``.
    """
    records = _distinct(read_records(each_row(source, split=split)))
    for placed in _chosen(records, source, subset=None, limit=None):
        yield placed.comparison


def large_files(source: str | Path, *, split: str) -> list[Path]:
    """The files of a source that is read by windows; none for any other source.

    Raises:
      DataError: for a source that does not exist.
    """
    resolved = _resolve(source, split=split)
    path = Path(resolved.name)
    if resolved.benchmark is not None:
        return []
    if resolved.kind is _Kind.FILE:
        return [path] if is_large(path) else []
    if resolved.kind is _Kind.PREPARED:
        files = sorted(_files(resolved, path, split=split))
        size = sum(file.stat().st_size for file in files)
        return files if size > blocks.LARGE or tokens_folder(path) is not None else []
    if resolved.kind is not _Kind.FOLDER:
        return []
    configs = list(folder_layout(path).values())
    files = list(configs[0].get(split, ())) if len(configs) == 1 else []
    known = all(file.name.endswith(LARGE_SUFFIXES) for file in files)
    return files if known and any(map(is_large, files)) else []


def source_rows(source: str | Path) -> list[Row]:
    """Return the records of a source as they stand there, in JSON files fields outside the schema too.

    Raises:
      DataError: as `read_comparisons`; of a file only what is no record at all.
    """
    resolved = _resolve(source, split="test")
    if resolved.kind is _Kind.FILE and resolved.benchmark is None:
        rows = list(_rows(resolved, subset=None, split="test"))
    else:
        found = read_comparisons(source)
        rows = [
            Row(f"{source}: record {number}", each.to_row()) for number, each in enumerate(found, start=1)
        ]
    if not rows:
        raise DataError(f"{source}: no comparisons in it")
    return rows


def describe_source(
    source: str | Path, *, split: str = "test", digests: Mapping[Path, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """What ``source`` is made of, JSON-ready: equal now and later only if its contents are.

    A prepared copy is described as its source is, so that one may take the place of the other.
    Files are named relative to the source with their sha256, so a moved file describes equally. Of
    a hub data set only the name is known without reading it. Large files are known by the digests of their blocks.

    Args:
      source: as of ``read_comparisons``.
      split: likewise.
      digests: of files that need not be read for it: their digests, or anything else that is to stand in their places.

    Raises:
      DataError: for a source that does not exist or cannot be read.
    """

    def digest(file: Path) -> Any:
        if file in digests:
            return digests[file]
        return blocks.large_digest(file) if is_large(file) else file_digest(file)

    resolved = _resolve(source, split=split)
    # The paper's data set needs no mark: it is read alike with and without its name.
    marked = resolved.benchmark not in (None, PRB) and resolved.kind is not _Kind.PREPARED
    mark: dict[str, Any] = {"benchmark": resolved.benchmark} if marked else {}
    if marked and resolved.benchmark not in benchmarks.NAMES:
        mark["plugin"] = get_plugin("benchmarks", str(resolved.benchmark), Benchmark).origin
    if resolved.columns.columns:
        mark["columns"] = dict(resolved.columns.columns)
    path = Path(resolved.name)
    if resolved.kind is _Kind.PREPARED:
        described = source_description(path, split=split)
        if described is not None:
            return described
    if resolved.kind is _Kind.FILE:
        return {"kind": "file", **mark, "files": {path.name: digest(path)}}
    if resolved.kind in (_Kind.FOLDER, _Kind.PREPARED):
        files = sorted(_files(resolved, path, split=split))
        return {
            "kind": resolved.kind.value,
            **mark,
            "split": split,
            "files": {file.relative_to(path).as_posix(): digest(file) for file in files},
        }
    if resolved.kind is _Kind.HUB:
        return {"kind": "hub", **mark, "repository": resolved.name, "split": split}
    if resolved.kind is _Kind.PYTHON:  # what the file computes may depend on more than the file
        rows = (row.value for row in _rows(resolved, subset=None, split=split))
        texts = (row.to_row() if isinstance(row, Comparison) else row for row in rows)
        content = sha256()
        for text in texts:
            content.update(json.dumps(text, sort_keys=True, default=str).encode() + b"\n")
        return {"kind": "python", "name": resolved.name.rpartition(":")[2], "sha256": content.hexdigest()}
    return {"kind": "generated", "name": PERSONAS, "part": resolved.name}


def _files(source: _Source, folder: Path, *, split: str) -> Iterable[Path]:
    """The files that are read."""
    if source.kind is _Kind.PREPARED:
        files = (file for file in folder.rglob("*") if file.is_file())
        return (file for file in files if not any(p.startswith(".") for p in file.relative_to(folder).parts))
    if source.benchmark is None:
        return folder_files(folder, split=split)
    return benchmark_files(benchmarks.get_benchmark(source.benchmark), folder, split=split)


def prepared_tokens(source: str | Path) -> Path | None:
    """The prepared folder that the source is, if it holds tokens beside the text."""
    resolved = _resolve(source, split="")
    folder = Path(resolved.name)
    return folder if resolved.kind is _Kind.PREPARED and tokens_folder(folder) is not None else None


def benchmark_of(source: str | Path) -> str | None:
    """The name of the benchmark that the source holds, whose rule scores it; None if it holds none.

    Raises:
      DataError: for a source that does not exist.
    """
    return _resolve(source, split="").benchmark


def _resolve(source: str | Path, *, split: str) -> _Source:
    """The source of a name, which may end in "?FIELD=COLUMN&..."."""
    source = localised(source)
    if isinstance(source, str) and (match := _COLUMNS.fullmatch(source)) and not Path(source).exists():
        found = _resolve(match["source"], split=split)
        if found.kind in (_Kind.GENERATED, _Kind.PYTHON, _Kind.PREPARED) or found.benchmark not in (
            None,
            PRB,
        ):
            raise DataError(
                f"{source}: columns can be mapped in files, folders and data sets of the hub alone"
            )
        columns = dict(pair.split("=", 1) for pair in match["columns"].split("&"))
        return replace(found, columns=FieldNames(columns))
    if isinstance(source, str):
        if is_python_value(source):
            return _Source(_Kind.PYTHON, source)
        name, colon, rest = source.partition(":")
        if name == PERSONAS:
            return _Source(_Kind.GENERATED, rest if colon else split)
        if name in benchmarks.benchmark_names():
            return _benchmark(name, rest if colon else None)
    return _place(source)


def _benchmark(name: str, place: str | None) -> _Source:
    """A benchmark from its own data set, or from the place after the colon."""
    repository, home = benchmarks.get_benchmark(name).repository, benchmarks.get_benchmark(name).home
    if place is None and repository is None:
        raise DataError(f"{name}: has no data set on the hub; give --data {name}:FOLDER with {home}")
    found = _Source(_Kind.HUB, str(repository)) if place is None else _place(place)
    if found.benchmark not in (None, name):
        raise DataError(f"{name}:{place}: holds the benchmark {quote(found.benchmark)}")
    return _Source(found.kind, found.name, name)


def _place(source: str | Path) -> _Source:
    path = Path(source)
    if path.is_dir():
        if is_prepared(path):
            benchmark = metadata(path).get("benchmark")
            return _Source(
                _Kind.PREPARED, str(path), benchmark if benchmark in benchmarks.benchmark_names() else None
            )
        return _Source(_Kind.FOLDER, str(path))
    if has_known_suffix(path) or path.exists():
        return _Source(_Kind.FILE, str(path))
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        benchmark = benchmarks.of_repository(source)
        return _Source(_Kind.HUB, source, None if benchmark is None else benchmark.name)
    raise DataError(
        f"{source}: no such file, folder or data set; expected a file ({', '.join(SUFFIXES)}), a folder, "
        f"a hub id (OWNER/NAME), FILE.py:NAME, {PERSONAS!r}, or a benchmark: {', '.join(benchmarks.benchmark_names())}"
    )


def each_row(source: str | Path, *, subset: str | None = None, split: str = "test") -> Iterator[Row]:
    """Yield the records of a source as they stand there, unchecked, or as comparisons where they are generated.

    Args:
      source, split: as of ``read_comparisons``.
      subset: of a folder or hub data set with several configs, the one that is read; files are read whole.

    Raises:
      DataError: a source that does not exist, or a file that cannot be read.
    """
    return _rows(_resolve(source, split=split), subset=subset, split=split)


def _rows(source: _Source, *, subset: str | None, split: str) -> Iterator[Row]:
    if source.kind is _Kind.GENERATED:
        personas = import_module("prb_jax.sources.personas")  # the generator, only where it is asked for
        for number, comparison in enumerate(personas.load(source.name), start=1):
            yield Row(f"{PERSONAS}:{source.name}: row {number}", comparison)
        return
    if source.kind is _Kind.PYTHON:
        for row in given_rows(_python_records(source.name)):
            yield Row(f"{source.name}: {row.where}", row.value)
        return
    place = source.name if source.kind is _Kind.HUB else Path(source.name)
    if source.benchmark not in (None, PRB):
        benchmark = benchmarks.get_benchmark(source.benchmark)
        yield from read_benchmark(benchmark, place, subset=subset, split=split)
        return
    if source.kind is _Kind.PREPARED:
        yield from read_prepared(Path(source.name), split=split)
        return
    rows: Iterable[Row]
    if source.kind is _Kind.FILE:
        rows = read_rows(Path(source.name), columns=source.columns)
    elif source.kind is _Kind.FOLDER:
        rows = read_folder(Path(source.name), subset=subset, split=split, columns=source.columns)
    else:
        rows = read_hub(source.name, subset=subset, split=split, columns=source.columns)
    mapped = FieldMapper(source.columns, source.name)
    for row in rows:
        yield Row(row.where, mapped(row.value, where=row.where))
    mapped.finish()


def _python_records(name: str) -> Any:
    """The records of FILE.py:NAME, which is a function that returns them, or the records themselves."""
    value = python_value(name).value
    try:
        return value() if callable(value) else value
    except PrbError:
        raise
    except Exception as error:
        raise DataError(f"{name}: fails: {type(error).__name__}: {error}") from error


def _distinct(records: Iterable[Placed]) -> Iterator[Placed]:
    """The same comparisons, refusing an id that was used before."""
    seen: dict[str, str] = {}
    for record in records:
        before = seen.setdefault(record.comparison.id, record.where)
        if before is not record.where:
            raise DataError(
                f"{record.where}: field 'id': {quote(record.comparison.id)} was already used at {before}"
            )
        yield record
