"""The data of a run: the comparisons of an evaluation with their fingerprints, and the job of scoring them.

A job has the view of the model and everything that decides the result.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import IOBase
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prb_jax.errors import DataError, PrbWarning, RunError, counted, printable, quote, short_repr
from prb_jax.metrics.rows import ScoredRow
from prb_jax.platform.processes.sharing import on_first_process, process_count, process_index
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
from prb_jax.records.intake import (
    Records,
    describe_source,
    digest,
    given_rows,
    large_files,
    open_comparisons,
    read_records,
    resolve,
)
from prb_jax.records.items import Held, Items, joined
from prb_jax.runs.evaluation import is_settled
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.options import Data, EvaluateOptions
from prb_jax.seams import get
from prb_jax.text.view import View
from prb_jax.version import computing_versions

if TYPE_CHECKING:
    from prb_jax.records.large_lines import JsonLines
    from prb_jax.runs.parts import Part
    from prb_jax.scoring.left_out import LeftOut
    from prb_jax.scoring.prepared_tokens import StoredComparisons
    from prb_jax.scoring.reader import Reader
    from prb_jax.scoring.scorer import Scorer


SPLIT = "test"  # the split to read if a source has several

_AT_A_TIME = 4096


@dataclass(frozen=True)
class Inputs:
    """Labelled comparisons with distinct ids, at least one."""

    comparisons: Items[Comparison]
    # digest of the comparisons' contents, in order; None if the sources list the digests of their files
    sha256: str | None
    # description of each named source (files and their sha256); empty for comparisons from Python. A large
    # file of JSON lines has the file object here instead of a sha256, because it is read during scoring:
    # see :meth:`described`.
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    subset: str | None = None
    # positions of the comparisons of each benchmark that the sources name
    benchmarks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # folder of all comparisons, if `prb prepare` also wrote their tokens
    prepared: Path | None = None
    # stamps of large sources; while a stamp is unchanged, the source need not be described again
    stamps: Mapping[str, Sequence[Any]] = field(default_factory=dict, repr=False)
    # origin of the comparisons' hints, by kind; empty without hints
    hints: Mapping[str, Any] = field(default_factory=dict)
    left_out: LeftOut | None = None  # comparisons too long for the model, if these are skipped

    __repr__ = short_repr

    @property
    def reading(self) -> list[JsonLines]:
        """Large files, which are read during scoring, each byte once."""
        values = (value for source in self.sources.values() for value in (source.get("files") or {}).values())
        return [value for value in values if not isinstance(value, str)]

    def complete(self) -> None:
        """Read the large files to the end, for their digests; a collective."""
        for file in self.reading:
            _ = file.digest

    def described(self, *, whole: bool = True) -> dict[str, Mapping[str, Any]]:
        """Return the description of each named source, JSON-ready; arguments as in :meth:`to_json`."""

        def digest_of(file: Any) -> Any:
            if isinstance(file, str):
                return file
            return file.digest if whole or file.complete else None

        described: dict[str, Mapping[str, Any]] = {}
        for name, source in self.sources.items():
            files = {file: digest_of(value) for file, value in (source.get("files") or {}).items()}
            described[name] = {**source, "files": files} if files else source
        return described

    def to_json(self, *, whole: bool = True) -> dict[str, Any]:
        """Return the description for `run.json`; a collective.

        Args:
          whole: If True, read large files to the end. Otherwise digests of files and the number of comparisons are None
            until they are known.

        Raises:
          DataError: A file cannot be read.
        """
        return {
            "sources": list(self.described(whole=whole).values()),
            "subset": self.subset,
            "comparisons": len(self.comparisons) if whole or self.comparisons.complete else None,
            "sha256": self.sha256,
        }


def read_inputs(data: Data, *, subset: str | None = None, limit: int | None = None) -> Inputs:
    """Read the comparisons of an evaluation.

    Args:
      data: Name of a file, folder, benchmark, hub data set or generated benchmark; several names; or records.
      subset: Name of the subset of the named sources to read.
      limit: Maximum number of comparisons of each source.

    Raises:
      DataError: `open_comparisons` fails, the data are empty, a comparison lacks labels, or an id occurs twice; the
        message names both places.
    """
    if limit is not None and (not isinstance(limit, Integral) or limit < 1):
        raise DataError(f"limit: expected a positive number of comparisons, found {quote(limit)}")
    names, given_records = _split(data)
    benchmarks: dict[str, list[int]] = {}
    stamps: dict[str, Sequence[Any]] = {}
    sources: dict[str, Mapping[str, Any]] = {}
    prepared: Path | None = None
    if given_records is not None:
        if subset is not None:
            raise DataError("subset: applies to named sources, not to comparisons given from Python")
        records = list(islice(read_records(given_rows(given_records)), limit))
        comparisons = Held(record.value for record in records)
        _check(records)
    else:
        parts: list[tuple[str, Items[Comparison]]] = []
        opened = [resolve(name, split=SPLIT) for name in names]
        if len(opened) == 1:
            prepared = opened[0].tokens
        for name, source in zip(names, opened, strict=True):
            if large := large_files(source, split=SPLIT):
                stamps[name] = get("large data", "stamp").value(large)
            else:
                # Described before reading, so that the final check detects a file that changes during reading.
                sources[name] = describe_source(source)
            with _no_garbage_collection():
                read = open_comparisons(name, subset=subset, limit=limit)
            if large:
                sources[name] = describe_source(source, digests=read.files)
            if source.benchmark is not None:
                before = sum(len(part) for _, part in parts)
                positions = range(before, before + len(read))
                benchmarks.setdefault(source.benchmark, []).extend(positions)
            parts.append((name, read))
        comparisons = joined(parts)
        if comparisons.in_memory:  # larger data are checked on reading
            _check(placed for name, part in parts for placed in part.placed(name))
    hashed = bool(sources) and all(source.get("files") for source in sources.values())
    return Inputs(
        comparisons=comparisons,
        sha256=None if hashed else digest(comparisons),
        sources=sources,
        subset=subset,
        benchmarks=benchmarks,
        prepared=prepared,
        stamps=stamps,
    )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off while records are built; it doubles reading time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _split(data: Data) -> tuple[list[str], Records | None]:
    """Return the names of sources, or the records."""
    if isinstance(data, str | Path):
        return [str(data)], None
    if isinstance(data, Comparison | Mapping) or hasattr(data, "__arrow_c_stream__"):
        return [], cast("Records", data)
    if not isinstance(data, Iterable) or isinstance(data, IOBase):
        return [], cast("Records", data)  # `read_records` raises the error
    items = iter(data)  # an endless iterator is read only up to the limit
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


def _check(records: Iterable[Row[Comparison]]) -> None:
    seen: dict[str, str] = {}
    for record in records:
        comparison, place = record.value, record.where
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
    if not seen:
        raise DataError("nothing to score: expected at least one comparison")


def warn_without_profiles(comparisons: Items[Comparison], reader: Reader | None, *, view: View) -> None:
    """Warn if a model was trained with profiles and comparisons (the first ones of large data) have none."""
    trained = None if reader is None else reader.trained
    if reader is None or trained is None or not (trained.view.profile_posts and view.profile_posts):
        return
    first = comparisons.sample(_AT_A_TIME)
    if lacking := sum(not (one.profile or one.hints) for one in first):
        some = f"{lacking:,} of {counted(len(first), 'comparison')} have no"
        warnings.warn(
            f"{reader.name} was trained with {counted(trained.view.profile_posts, 'post')} of each user's profile, and "
            f"{'no comparison has a' if lacking == len(first) else some} profile: scored without the user it is for",
            PrbWarning,
            stacklevel=2,
        )


def warn_of_cuts(cut: int, total: int, name: str) -> None:
    """Warn a Python caller that comparisons were too long for the model, so a part of their text was left out."""
    if cut:
        warnings.warn(
            f"{name}: {cut:,} of {counted(total, 'comparison')} did not fit the maximum length, so the model saw only "
            "a part of the profile or prompt; max_length sets the limit, and fewer profile_posts make prompts shorter",
            PrbWarning,
            stacklevel=4,
        )


class ComparisonTable:
    """The comparisons of a run in memory; `prb_jax.scoring.large_table.LargeTable` has columns without texts."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self._comparisons = comparisons

    def __len__(self) -> int:
        """Return the number of comparisons read so far."""
        return len(self._comparisons)

    def id(self, index: int) -> str:
        """Return the id of a comparison."""
        return self._comparisons[index].id

    @cached_property
    def ids(self) -> Sequence[str]:
        """Ids of all comparisons read so far."""
        return [one.id for one in self._comparisons]

    @cached_property
    def labels(self) -> Any:
        """Labels of each comparison, by its index."""
        return [list(one.labels or ()) for one in self._comparisons]

    def row(self, index: int, scores: Sequence[float], *, tokens: int = 0, truncated: Any = 0) -> ScoredRow:
        """Return the row of a comparison with its scores."""
        one = self._comparisons[index]
        return ScoredRow(one.id, one.subset, one.user_id, scores, self.labels[index], tokens, truncated)

    def told(self) -> int:
        """Return the number of comparisons with user information: a user id, a profile or hints."""
        return sum(one.has_user_info for one in self._comparisons)

    def advance(self, stop: int) -> None:
        """Read the comparisons before index `stop`; those in memory are read."""

    def complete(self) -> None:
        """Read all comparisons and warn of duplicates; those in memory are read."""


def table_of(comparisons: Items[Comparison]) -> ComparisonTable:
    """Return the table of a run's comparisons; those larger than memory enter it on their first read."""
    if comparisons.in_memory:
        return ComparisonTable(comparisons)
    return get("large data", "table").value(comparisons)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of one run: an evaluation, or one of its controls."""

    name: str
    scorer: Scorer
    inputs: Inputs
    table: ComparisonTable
    # inputs of the model, in the same order: comparisons, their prepared tokens, or the comparisons of a control
    shown: Items[Comparison]
    view: View
    decided: Mapping[str, Any]  # everything that decides the result, as in `run.json`
    notes: Mapping[str, Any] = field(default_factory=dict)  # other entries of `run.json`
    part: Part | None = None  # part of the batches, if the run is one of several jobs
    control: str | None = None  # name of the control, if the run is one

    __repr__ = short_repr

    @property
    def reading(self) -> list[JsonLines]:
        """Large files that this run reads, and compares with their digests; a control finds them read."""
        return self.inputs.reading if self.control is None else []


def open_job(scorer: Scorer, inputs: Inputs, options: EvaluateOptions) -> Job:
    """Return the job of an evaluation: all comparisons, or those that fit, as text or as prepared tokens.

    Raises:
      RunError: An option has no effect on this scorer, or there are hints and the scorer does not read a prompt.
      DataError: The view is impossible, or no comparison fits.
    """
    scorer.refuse_unused({**asdict(options.view), "batch_tokens": options.batch_tokens})
    identity = dict(scorer.identity())
    known_as = str(identity.pop("name", "model"))
    chosen, reader = scorer.choose_view(options.view), scorer.reader
    chosen.warn(known_as)
    view = chosen.view
    if options.too_long != "error":
        get("evaluation", "check too long").value(options.too_long, reader, view=view)
    warn_without_profiles(inputs.comparisons, reader, view=view)
    remarks = list(scorer.remarks(view))
    for remark in remarks if process_index() == 0 else ():
        print(f"prb: {printable(remark)}", file=sys.stderr)
    if inputs.hints and not scorer.has_prompt:
        extras = ", ".join(extra for extra in inputs.hints if extra != UPPER_BOUND)
        raise RunError(f"{extras}: {known_as} has no prompt to which they could be added")
    if options.folder is not None and on_first_process(functools.partial(is_settled, options.folder)):
        inputs.complete()  # so the digests are compared with the folder's record before rows are added
    decided = {
        # A moved folder is still the same model; a baseline has only a name.
        "model": identity or {"name": known_as},
        "data": inputs.to_json(whole=False),
        **view.shown,
        **(view.wording if scorer.has_heading else {}),
        "limit": options.limit,
        "seed": options.seed,
        "versions": computing_versions(plain=not scorer.has_weights),
        **({} if options.too_long == "error" else {"too_long": options.too_long}),
        **({"hints": inputs.hints} if inputs.hints else {}),
        **({} if options.part is None else {"part": options.part}),
    }
    if process_count() > 1:  # covers the tokenizer, and models passed as objects
        get("processes", "agreement").value(decided)
    notes = {
        "model": options.name or known_as,
        "data": list(inputs.sources),
        **({"overrides": chosen.overrides} if chosen.overrides else {}),
        **({"remarks": remarks} if remarks else {}),
    }
    tokens: StoredComparisons | None = None
    if inputs.prepared is not None and reader is not None:
        tokens = get("evaluation", "prepared").value(reader, inputs, view, options)
    if options.too_long == "skip":
        leave_out = get("evaluation", "leave out").value
        inputs = leave_out(inputs, reader, view=view, has_tokens=tokens is not None)
    return Job(
        name=options.name or known_as,
        scorer=scorer,
        inputs=inputs,
        table=table_of(inputs.comparisons) if tokens is None else tokens.table(),
        # Scorers with a reader accept prepared tokens too.
        shown=inputs.comparisons if tokens is None else cast("Items[Comparison]", tokens),
        view=view,
        decided=decided,
        notes=notes,
        part=None if options.part is None else get("parts", "parse").value(options.part),
    )
