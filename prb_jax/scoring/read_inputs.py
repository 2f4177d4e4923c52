"""Read the comparisons of one evaluation: by the names of their sources, or as they are given from Python."""

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from prb_jax.data.comparison import Comparison
from prb_jax.data.lines import JsonLines
from prb_jax.data.records import Records, digest, given_rows, read_records
from prb_jax.errors import DataError, quote
from prb_jax.scoring.inputs import Inputs
from prb_jax.sources.large import LargeComparisons, stamp
from prb_jax.sources.reading import (
    Opened,
    benchmark_of,
    describe_source,
    large_files,
    open_comparisons,
    prepared_tokens,
)

SPLIT = "test"
"""The split that is read of sources that have several."""

Data = str | Path | Sequence[str | Path] | Records


def read_inputs(data: Data, *, subset: str | None = None, limit: int | None = None) -> Inputs:
    """Reads what is to be scored.

    Args:
      data: a file, folder, benchmark, hub data set or generated benchmark by name; several of them; or
        the records themselves.
      subset: reads one subset of the named sources.
      limit: reads at most so many comparisons, of each source.

    Raises:
      DataError: what `open_comparisons` raises; no comparison at all; one without labels; an id
        given twice, naming both places.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit: expected a positive number of comparisons, found {limit}")
    names, given = _split(data)
    benchmarks: dict[str, list[int]] = {}
    stamps: dict[str, Sequence[Any]] = {}
    comparisons: Sequence[Comparison]
    if given is not None:
        if subset is not None:
            raise DataError("subset: applies to named sources, not to comparisons given from Python")
        found = list(islice(read_records(given_rows(given)), limit))
        comparisons, places = [each.comparison for each in found], [each.where for each in found]
        sources: dict[str, Mapping[str, Any]] = {}
    else:
        sources, parts = {}, []
        for name in names:
            if not large_files(name, split=SPLIT):
                # Described first: a file that changes while it is read is then found out at the end.
                sources[name] = describe_source(name)
            with _no_garbage_collection():
                opened = open_comparisons(name, subset=subset, limit=limit)
            if opened.stamp:
                sources[name] = describe_source(name, digests=_unread(opened))
                stamps[name] = opened.stamp
            if (benchmark := benchmark_of(name)) is not None:
                before = sum(len(part) for _, part in parts)
                positions = range(before, before + len(opened.comparisons))
                benchmarks.setdefault(benchmark, []).extend(positions)
            parts.append((name, opened.comparisons))
        if stamps:
            comparisons, places = LargeComparisons.joined(parts), []
        else:
            comparisons = [comparison for _, part in parts for comparison in part]
            places = [name for name, part in parts for _ in part]
    if not isinstance(comparisons, LargeComparisons):
        _check(comparisons, places)
    hashed = bool(sources) and all(source.get("files") for source in sources.values())
    return Inputs(
        comparisons=comparisons,
        sha256=None if hashed else digest(comparisons),
        sources=sources,
        subset=subset,
        benchmarks=benchmarks,
        describe=describe_source,
        prepared=prepared_tokens(names[0]) if len(names) == 1 else None,
        stamps=stamps,
        stamp=lambda name: stamp(large_files(name, split=SPLIT)),
    )


def _unread(opened: Opened) -> dict[Path, Any]:
    """In place of the digests of files those files that are not read to their ends yet."""
    return {path: rows if isinstance(rows, JsonLines) else rows.digest for path, rows in opened.files.items()}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Records are no garbage: looking through them again and again doubles the time of reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _split(data: Data) -> tuple[list[str], Records | None]:
    """Names of sources, or the records themselves."""
    if isinstance(data, str | Path):
        return [str(data)], None
    if isinstance(data, Comparison | Mapping) or hasattr(data, "__arrow_c_stream__"):
        return [], cast("Records", data)
    if not isinstance(data, Iterable):
        return [], cast("Records", data)  # refused where records are read
    items = iter(data)  # an endless one is read no further than asked for
    first = list(islice(items, 1))
    if not first or not isinstance(first[0], str | Path):
        return [], cast("Records", chain(first, items))
    names: list[str] = []
    for position, name in enumerate(chain(first, items)):
        if not isinstance(name, str | Path):
            raise DataError(
                f"position {position}: expected the name of a source, found {type(name).__name__}"
            )
        if str(name) in names:
            raise DataError(f"{name}: given twice as a source")
        names.append(str(name))
    return names, None


def _check(comparisons: Sequence[Comparison], places: Sequence[str]) -> None:
    if not comparisons:
        raise DataError("nothing to score: expected at least one comparison")
    seen: dict[str, str] = {}
    for comparison, place in zip(comparisons, places, strict=True):
        if comparison.labels is None:
            raise DataError(
                f"{place}: comparison {quote(comparison.id)} has no labels, so it cannot be evaluated"
            )
        if comparison.id in seen:
            raise DataError(
                f"comparison id {quote(comparison.id)} occurs twice: in {seen[comparison.id]} and in {place}; "
                f"ids must be distinct within one run"
            )
        seen[comparison.id] = place
