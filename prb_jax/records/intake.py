"""Comparisons of any origin: a file, a folder, a benchmark or data set of the hub, the generated benchmark, or Python.

A name becomes a `Source` (`resolve`), a source gives rows, and rows become comparisons (`read_records`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from io import IOBase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from prb_jax.errors import DataError, quote
from prb_jax.platform.paths import is_path, localised, near_path
from prb_jax.records import fields
from prb_jax.records.comparison import LISTS, Comparison
from prb_jax.records.fields import RECORD, FieldMapper, FieldNames
from prb_jax.records.files import SUFFIXES, Row, file_digest, has_known_suffix, is_large
from prb_jax.records.items import Held, Items
from prb_jax.records.sources.source import FileSource, Source, same_subset
from prb_jax.seams import get, is_python_value, names

PERSONAS: Final = "personas"
PRB: Final = "prb"  # the paper's data set, read in the same way with and without its name

_COLUMN: Final = r"(\w+=[^&=?]+|rendered)"
_COLUMNS: Final = re.compile(rf"(?P<source>.+)\?(?P<columns>{_COLUMN}(&{_COLUMN})*)", re.DOTALL)
_NO_SUBSET: Final = "(none)"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ArrowTable(Protocol):
    """A table with the Arrow C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


MODEL_FIRST: Final = (
    "the model is the first argument and the data are the second (on the command line, --data)"
)
"""Hint for a caller who has exchanged the two."""

Records = Comparison | Mapping[str, Any] | Iterable[Comparison | Mapping[str, Any]] | ArrowTable
"""One comparison or object with the fields of a record; any iterable of them, e.g. a list, a generator or a data set of
``datasets``; or a table with the Arrow C stream interface, e.g. from pandas, polars or pyarrow."""


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
        or the records themselves: see ``Records``.
        A name may end in "?FIELD=COLUMN&...", for data whose columns have other names ("votes.csv?user_id=voter"), and
        in "?rendered", for texts that a chat template has rendered: they are taken as they are.
      subset: Subset to keep; for the paper's data set the long or short name ("Art").
      split: Split of a folder, a hub data set, or the generated benchmark if it is named without a part;
        benchmarks but the paper's are read from the split that they are published in.
      limit: Maximum number of comparisons (of the subset). A file is not read further.

    Returns:
      At least one comparison, in the order of the source, with distinct ids.

    Raises:
      DataError: The source does not exist, cannot be read or is empty, or a record is invalid; the message names file,
        line and field of the first error.
    """
    return list(each_comparison(source, subset=subset, split=split, limit=limit))


def each_comparison(
    source: str | Path | Records, *, subset: str | None = None, split: str = "test", limit: int | None = None
) -> Iterator[Comparison]:
    """Yield the comparisons of ``read_comparisons`` one by one, with the same errors."""
    check_limit(limit)
    named = isinstance(source, str | Path)
    rows = each_row(source, subset=subset, split=split) if named else given_rows(source)
    name = source if named else "data"
    for placed in chosen(_distinct(read_records(rows)), name, subset=subset, limit=limit):
        yield placed.value


def open_comparisons(
    source: str | Path, *, subset: str | None = None, split: str = "test", limit: int | None = None
) -> Items[Comparison]:
    """Like ``read_comparisons``, but comparisons of large files are read sequentially on access.

    JSON lines, also ``.gz``, parquet files and prepared folders of more than ``prb_jax.records.files.LARGE`` bytes are
    large. Their records are checked when they are read, and distinct ids are left to the caller.
    """
    opened = resolve(source, split=split)
    files = large_files(opened, split=split)
    if not files:
        return Held(each_comparison(source, subset=subset, split=split, limit=limit))
    check_limit(limit)
    return get("large data", "open").value(
        opened, files, name=source, subset=subset, split=split, limit=limit
    )


def each_row(source: str | Path, *, subset: str | None = None, split: str = "test") -> Iterator[Row]:
    """Yield the raw, unchecked records of a source; generated sources yield comparisons.

    Args:
      subset: Config to read from a folder or hub data set with several; files are read completely.

    Raises:
      DataError: The source does not exist, or a file cannot be read.
    """
    opened = resolve(source, split=split)
    return mapped_rows(lambda: opened.rows(subset=subset, split=split), opened)()


def describe_source(
    source: str | Path | Source, *, split: str = "test", digests: Mapping[Path, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a JSON-ready description of ``source``, which changes if the contents change.

    A prepared copy has the description of its source, so each can replace the other.
    Files are named relative to the source with their sha256, so a moved file describes equally. Of
    a hub data set only the name is known without reading it. Large files are known by the digests of their blocks.

    Args:
      source, split: Source and split, as in ``read_comparisons``.
      digests: Known digests of files, or placeholders for them; these files are not read.

    Raises:
      DataError: The source does not exist or cannot be read.
    """

    def digest(file: Path) -> Any:
        if file in digests:
            return digests[file]
        return get("large data", "digest").value(file) if is_large(file) else file_digest(file)

    return resolve(source, split=split).describe(split=split, digest=digest)


def large_files(source: str | Path | Source, *, split: str) -> Sequence[Path]:
    """Return the files of a source that is read by windows; else nothing. Errors as in ``describe_source``."""
    opened = resolve(source, split=split)
    return opened.large_files(split=split) if opened.benchmark is None else []


def benchmark_of(source: str | Path) -> str | None:
    """Return the name of the source's benchmark, if any; errors as in ``describe_source``."""
    return resolve(source, split="").benchmark


def resolve(given: str | Path | Source, *, split: str) -> Source:
    """Return the source of a name, which can end in "?FIELD=COLUMN&...&rendered"; a source stays as it is."""
    if isinstance(given, Source):
        return given
    source: str | Path = localised(given)
    if isinstance(source, str) and (match := _COLUMNS.fullmatch(source)) and not Path(source).exists():
        opened = resolve(match["source"], split=split)
        if not opened.has_columns:
            raise DataError(f"{source}: columns can be mapped only in files, folders and hub data sets")
        parts = match["columns"].split("&")
        columns = dict(part.split("=", 1) for part in parts if "=" in part)
        return replace(opened, columns=FieldNames(columns, rendered="rendered" in parts))
    name, colon, place = source.partition(":") if isinstance(source, str) else ("", "", "")
    if isinstance(source, str) and is_python_value(source):
        return get("sources", "python").value(source)
    if name == PERSONAS:
        return get("sources", PERSONAS).value(place if colon else split)
    if name not in names("benchmarks"):
        opened = _at(source)
    elif colon:
        opened = _at(place)
        if opened.benchmark not in (None, name):
            raise DataError(f"{source}: contains the benchmark {quote(opened.benchmark)}")
        opened = replace(opened, benchmark=name)
    else:
        opened = get("sources", "published").value(name)
    if opened.benchmark in (None, PRB):
        return opened
    return get("sources", "benchmark").value(opened.name, benchmark=opened.benchmark, inner=opened)


def _at(place: str | Path) -> Source:
    """Return the source at a path or hub id, with the name of its benchmark, if given."""
    path = Path(place)
    if path.is_dir():
        if is_model_folder(path):
            raise DataError(f"{place}: expected data, found the folder of a model; {MODEL_FIRST}")
        return get("sources", "folder").value(str(path))
    if has_known_suffix(path) or path.exists():
        return FileSource(str(path))
    if isinstance(place, str) and _HUB_ID.fullmatch(place) and not is_path(place):
        return get("sources", "hub").value(place)
    if str(place).startswith("baseline:"):
        raise DataError(f"{place}: expected data, found the name of a model; {MODEL_FIRST}")
    raise DataError(
        f"{place}: no such file, folder or data set{near_path(path)}; expected a file ({', '.join(SUFFIXES)}), a "
        f"folder, a hub id (OWNER/NAME), FILE.py:NAME, {PERSONAS!r}, or a benchmark: {', '.join(names('benchmarks'))}"
    )


def is_model_folder(folder: Path) -> bool:
    """Return True for a folder with the files of a model, or of a run that trained one."""
    weights = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return bool(weights) or all((folder / name).exists() for name in ("train.json", "model"))


def mapped_rows(rows: Callable[[], Iterator[Row]], source: Source) -> Callable[[], Iterator[Row]]:
    """Return a function that yields the rows of a pass with mapped columns renamed to fields."""
    if not source.has_columns or source.columns is None:
        return rows
    mapper = FieldMapper(source.columns, source.name)

    def mapped() -> Iterator[Row]:
        for row in rows():
            value = mapper(row.value, where=row.where)
            yield row if value is row.value else Row(row.where, value)
        mapper.finish()

    return mapped


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise DataError(f"limit: expected at least 1, found {limit}")


def chosen(
    records: Iterable[Row[Comparison]], source: object, *, subset: str | None, limit: int | None
) -> Iterator[Row[Comparison]]:
    """Yield the first ``limit`` comparisons of a subset; DataError if there is none."""
    taken, others = 0, set[str]()
    for placed in records:
        if subset is not None and not same_subset(placed.value.subset, subset):
            others.add(placed.value.subset or _NO_SUBSET)
            continue
        yield placed
        taken += 1
        if taken == limit:
            return
    if not taken and others == {_NO_SUBSET}:
        raise DataError(
            f"{source}: no subset {quote(subset)}: its records have no field 'subset'; leave it out"
        )
    if not taken and others:
        raise DataError(f"{source}: no subset {quote(subset)}; expected one of {', '.join(sorted(others))}")
    if not taken:
        raise DataError(f"{source}: no comparisons in it; expected at least one")


def _distinct(records: Iterable[Row[Comparison]]) -> Iterator[Row[Comparison]]:
    """Yield the same comparisons; DataError for an id that was used before."""
    seen: dict[str, str] = {}
    for record in records:
        before = seen.setdefault(record.value.id, record.where)
        if before is not record.where:
            raise DataError(
                f"{record.where}: field 'id': {quote(record.value.id)} was already used at {before}"
            )
        yield record


def as_comparisons(data: Records, *, labelled: bool = True) -> list[Comparison]:
    """Return the comparisons of a Python caller's records; see ``given_rows`` and ``read_records``."""
    return [row.value for row in read_records(given_rows(data), labelled=labelled)]


def given_rows(data: Records) -> Iterator[Row[Any]]:
    """Yield a Python caller's records with their positions, read one by one.

    Raises:
      DataError: The data are not of type ``Records``.
    """
    mapped = FieldMapper(RECORD, "data")
    if hasattr(data, "__arrow_c_stream__"):
        for position, value in enumerate(get("formats", "table").value(data, RECORD, where="data")):
            yield Row(f"position {position}", mapped(value, where=f"position {position}"))
        return
    if isinstance(data, Mapping) and data and all(hasattr(part, "column_names") for part in data.values()):
        raise DataError(
            f"data: expected one split of a data set, found all of them: {', '.join(map(str, data))}"
        )
    items: Any = [data] if isinstance(data, Comparison | Mapping) else data
    if isinstance(items, str | Path):
        raise DataError(
            f"data: expected comparisons, or a table of records, found the text {quote(str(items))}; read a file or "
            "data set first: prb.read_comparisons(NAME)"
        )
    if isinstance(items, IOBase):
        raise DataError(
            f"data: expected comparisons, found an open file; give its name: {quote(getattr(items, 'name', None))}"
        )
    if isinstance(items, bytes) or not isinstance(items, Iterable):
        is_model = callable(items) or any(hasattr(items, name) for name in ("stream", "score_tokens"))
        hint = f"; {MODEL_FIRST}" if is_model else ""
        raise DataError(
            f"data: expected comparisons, or a table of records, found {type(data).__name__}{hint}"
        )
    for position, item in enumerate(items):
        where = f"position {position}"
        if isinstance(item, Mapping):
            lists = {name: fields.as_list(item[name]) for name in LISTS if name in item}
            yield Row(where, mapped({**item, **lists}, where=where))
        elif isinstance(item, Comparison):
            yield Row(where, item)
        else:
            expected = "expected a Comparison or an object with its fields"
            raise DataError(f"{where}: {expected}, found {type(item).__name__}")


def read_records(
    rows: Iterable[Row[Any]], *, labelled: bool = True, tell: bool = True
) -> Iterator[Row[Comparison]]:
    """Yield the comparisons of rows; the second of equal records without an id gets the id "ID#2", and so on.

    Args:
      rows: Rows of records.
      labelled: If True, records must have labels.
      tell: If True, warn at the end about duplicates, similar user names, and prompts that are already rendered.

    Raises:
      DataError: A record is invalid.
    """
    unnamed: Counter[str] = Counter()
    read = (_read(row, unnamed, labelled=labelled) for row in rows)
    return get("formats", "remarks").value(read, unnamed) if tell else read


def _read(row: Row[Any], unnamed: Counter[str], *, labelled: bool) -> Row[Comparison]:
    if isinstance(row.value, Comparison):
        return row
    comparison = Comparison.from_row(row.value, where=row.where, labelled=labelled)
    named = row.value.get("id") is not None
    if not named:
        unnamed[comparison.id] += 1
        if (count := unnamed[comparison.id]) > 1:
            value = {**row.value, "id": f"{comparison.id}#{count}"}
            comparison = Comparison.from_row(value, where=row.where, labelled=labelled)
    return Row(row.where, comparison, named)


def digest(comparisons: Iterable[Comparison]) -> str:
    """Return ``"sha256:..."`` of the contents of comparisons, in order."""
    hashed = sha256()
    for comparison in comparisons:
        hashed.update(json.dumps(comparison.to_row(), sort_keys=True).encode())
        hashed.update(b"\n")
    return f"sha256:{hashed.hexdigest()}"
