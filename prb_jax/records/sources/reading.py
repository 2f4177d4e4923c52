"""Comparisons by name: a file, a folder, a benchmark or data set of the hub, or the generated benchmark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.platform.paths import localised
from prb_jax.records import lines
from prb_jax.records.comparison import Comparison
from prb_jax.records.field_names import FieldMapper, FieldNames
from prb_jax.records.files import SUFFIXES, file_digest, has_known_suffix
from prb_jax.records.intake import Records, given_rows, read_records
from prb_jax.records.items import Held, Items
from prb_jax.records.lines import Row, is_large, large_digest, unpacked_size
from prb_jax.records.schema import check_schema
from prb_jax.records.sources.source import FileSource, PythonSource, Source, same_subset
from prb_jax.seams import get, is_imported, is_python_value, names

PERSONAS: Final = "personas"
PRB: Final = "prb"  # the paper's data set, which is read alike with and without its name

_COLUMN: Final = r"(\w+=[^&=?]+|rendered)"
_COLUMNS: Final = re.compile(rf"(?P<source>.+)\?(?P<columns>{_COLUMN}(&{_COLUMN})*)", re.DOTALL)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def read_comparisons(
    source: str | Path | Records, *, subset: str | None = None, split: str = "test", limit: int | None = None
) -> list[Comparison]:
    """Read and check labelled comparisons.

    Args:
      source: one of
        a file: .jsonl, .json (JSON lines or one array), .csv, all also .gz, or .parquet;
        a folder in the layout of a hub data set, or one that ``prb prepare`` wrote;
        a benchmark of ``prb_jax.records.benchmarks`` by its name or hub id ("prb" is the paper's), or, as
        "NAME:PATH", a folder or file of it; or another hub id;
        "personas" or "personas:PART", the generated benchmark;
        "FILE.py:NAME", a function of a Python file that returns records, or the records;
        or the records themselves: see ``prb_jax.records.intake.Records``.
        A name may end in "?FIELD=COLUMN&...", for data whose columns have other names ("votes.csv?user_id=voter"), and
        in "?rendered", for texts that a chat template has rendered: they are taken as they are.
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
    return list(each_comparison(source, subset=subset, split=split, limit=limit))


def each_comparison(
    source: str | Path | Records, *, subset: str | None = None, split: str = "test", limit: int | None = None
) -> Iterator[Comparison]:
    """Yield the comparisons that ``read_comparisons`` gives, one after another; errors likewise."""
    check_limit(limit)
    named = isinstance(source, str | Path)
    rows = each_row(source, subset=subset, split=split) if named else given_rows(source)
    name = source if named else "data"
    for placed in chosen(_distinct(read_records(rows)), name, subset=subset, limit=limit):
        yield placed.value


def open_comparisons(
    source: str | Path, *, subset: str | None = None, split: str = "test", limit: int | None = None
) -> Items[Comparison]:
    """As ``read_comparisons``, but comparisons of large files are read forward when they are asked for.

    JSON lines, also ``.gz``, parquet files and prepared folders of more than ``prb_jax.records.lines.LARGE`` bytes are
    large. Their records are checked when they are read, and distinct ids are left to the caller.
    """
    opened = _resolve(source, split=split)
    files = _large_files(opened, split=split)
    if not files:
        return Held(each_comparison(source, subset=subset, split=split, limit=limit))
    check_limit(limit)
    return get("large data", "open").value(
        opened, files, name=source, subset=subset, split=split, limit=limit
    )


def find_comparisons(
    source: str | Path, *, subset: str | None = None, split: str = "train", limit: int | None = None
) -> Items[Comparison]:
    """As ``read_comparisons``, for comparisons that are looked up in any order.

    Those of a large prepared folder stay on the disk: it is given whole, and subset and limit are left to the caller.

    Raises:
      DataError: as ``read_comparisons``; raw files that are too large to be held in memory.
    """
    opened = _resolve(source, split=split)
    files = _large_files(opened, split=split)
    if files and (stored := opened.stored(split=split)) is not None:
        return stored
    if sum(map(unpacked_size, files)) > lines.HELD:
        raise DataError(
            f"{source}: too large to be held in memory, and records of raw files are not looked up one by one: run "
            f"`prb prepare --data {source} --split {split} --out DIR` once, and give DIR in its place"
        )
    return Held(each_comparison(source, subset=subset, split=split, limit=limit))


def each_row(source: str | Path, *, subset: str | None = None, split: str = "test") -> Iterator[Row]:
    """Yield the records of a source as they stand there, unchecked, or as comparisons where they are generated.

    Args:
      subset: of a folder or hub data set with several configs, the one that is read; files are read whole.

    Raises:
      DataError: a source that does not exist, or a file that cannot be read.
    """
    opened = _resolve(source, split=split)
    return mapped_rows(lambda: opened.rows(subset=subset, split=split), opened)()


def source_rows(source: str | Path) -> list[Row]:
    """Return the records of a source as they stand there, in JSON files fields outside the schema too.

    Raises:
      DataError: as `read_comparisons`; the records of a file need only be JSON objects or rows.
    """
    opened = _resolve(source, split="test")
    if opened.kind == "file" and opened.benchmark is None:
        rows = list(each_row(source))
    else:
        numbered = enumerate(each_comparison(source), start=1)
        rows = [Row(f"{source}: record {number}", one.to_row()) for number, one in numbered]
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
      source, split: as of ``read_comparisons``.
      digests: of files that need not be read for it: their digests, or anything else that is to stand in their places.

    Raises:
      DataError: for a source that does not exist or cannot be read.
    """

    def digest(file: Path) -> Any:
        if file in digests:
            return digests[file]
        return large_digest(file) if is_large(file) else file_digest(file)

    return _resolve(source, split=split).describe(split=split, digest=digest)


def large_files(source: str | Path, *, split: str) -> Sequence[Path]:
    """The files of a source that is read by windows; none for any other source. Errors as of ``describe_source``."""
    return _large_files(_resolve(source, split=split), split=split)


def recorded_sources(names: Any, *, where: str) -> list[str]:
    """Return the names of sources that a record of a run has, to open them again.

    Records are data, which strangers may have written: a Python file that one names is not run, unless the user lets it
    run by `--import`.

    Args:
      names: What the record says.
      where: File of the record, for the message.

    Raises:
      DataError: a name of a Python file, or something else than names.
    """
    check_schema(names, list[str], where=f"{where}: data", error=DataError)
    for name in names:
        if _resolve(name, split="").kind == PythonSource.kind and not is_imported(name):
            raise DataError(
                f"{where}: names the Python file of {name}, which a record cannot run: to run it, name it again, "
                f"--data {name}"
            )
    return names


def prepared_tokens(source: str | Path) -> Path | None:
    """The prepared folder that the source is, if it holds tokens beside the text."""
    return _resolve(source, split="").tokens


def benchmark_of(source: str | Path) -> str | None:
    """The name of the benchmark that the source holds, if it holds one; errors as of ``describe_source``."""
    return _resolve(source, split="").benchmark


def _resolve(source: str | Path, *, split: str) -> Source:
    """Open the source of a name, which may end in "?FIELD=COLUMN&...&rendered"."""
    source = localised(source)
    if isinstance(source, str) and (match := _COLUMNS.fullmatch(source)) and not Path(source).exists():
        opened = _resolve(match["source"], split=split)
        if not opened.has_columns:
            raise DataError(
                f"{source}: columns can be mapped in files, folders and data sets of the hub alone"
            )
        parts = match["columns"].split("&")
        columns = dict(part.split("=", 1) for part in parts if "=" in part)
        return replace(opened, columns=FieldNames(columns, rendered="rendered" in parts))
    name, colon, place = source.partition(":") if isinstance(source, str) else ("", "", "")
    if isinstance(source, str) and is_python_value(source):
        return PythonSource(source)
    if name == PERSONAS:
        return get("sources", PERSONAS).value(place if colon else split)
    if name not in names("benchmarks"):
        opened = _at(source)
    elif colon:
        opened = _at(place)
        if opened.benchmark not in (None, name):
            raise DataError(f"{source}: holds the benchmark {quote(opened.benchmark)}")
        opened = replace(opened, benchmark=name)
    else:
        opened = get("sources", "published").value(name)
    if opened.benchmark in (None, PRB):
        return opened
    return get("sources", "benchmark").value(opened.name, benchmark=opened.benchmark, inner=opened)


def _at(place: str | Path) -> Source:
    """What lies at a path or an id, with the name of the benchmark that it says to hold."""
    path = Path(place)
    if path.is_dir():
        return get("sources", "folder").value(str(path))
    if has_known_suffix(path) or path.exists():
        return FileSource(str(path))
    if isinstance(place, str) and _HUB_ID.fullmatch(place):
        return get("sources", "hub").value(place)
    raise DataError(
        f"{place}: no such file, folder or data set; expected a file ({', '.join(SUFFIXES)}), a folder, "
        f"a hub id (OWNER/NAME), FILE.py:NAME, {PERSONAS!r}, or a benchmark: {', '.join(names('benchmarks'))}"
    )


def _large_files(source: Source, *, split: str) -> Sequence[Path]:
    return source.large_files(split=split) if source.benchmark is None else []


def mapped_rows(rows: Callable[[], Iterator[Row]], source: Source) -> Callable[[], Iterator[Row]]:
    """The rows of each pass, their columns under the names of fields."""
    if not source.has_columns or source.columns is None:
        return rows
    mapper = FieldMapper(source.columns, source.name)

    def mapped() -> Iterator[Row]:
        for row in rows():
            yield Row(row.where, mapper(row.value, where=row.where))
        mapper.finish()

    return mapped


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise DataError(f"limit: expected at least 1, found {limit}")


def chosen(
    records: Iterable[Row[Comparison]], source: object, *, subset: str | None, limit: int | None
) -> Iterator[Row[Comparison]]:
    """The first ``limit`` comparisons of a subset; at least one."""
    taken, others = 0, set[str]()
    for placed in records:
        if subset is not None and not same_subset(placed.value.subset, subset):
            others.add(placed.value.subset or "(none)")
            continue
        yield placed
        taken += 1
        if taken == limit:
            return
    if not taken and others:
        raise DataError(f"{source}: no subset {quote(subset)}; expected one of {', '.join(sorted(others))}")
    if not taken:
        raise DataError(f"{source}: no comparisons in it")


def _distinct(records: Iterable[Row[Comparison]]) -> Iterator[Row[Comparison]]:
    """The same comparisons, refusing an id that was used before."""
    seen: dict[str, str] = {}
    for record in records:
        before = seen.setdefault(record.value.id, record.where)
        if before is not record.where:
            raise DataError(
                f"{record.where}: field 'id': {quote(record.value.id)} was already used at {before}"
            )
        yield record
