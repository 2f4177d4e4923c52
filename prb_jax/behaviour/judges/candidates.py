"""Samples as comparisons with many responses, from a run of `prb sample` or a file of texts from any source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from prb_jax.behaviour.generation.sample import RUNS, SAMPLE_ROWS, read_samples
from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison
from prb_jax.records.sources.recorded import recorded_sources
from prb_jax.runs.kind import RUN, as_recorded
from prb_jax.runs.rows import Row
from prb_jax.scoring.inputs import read_inputs


class _TextLine(TypedDict):
    id: str
    sample: int
    text: str


@dataclass(frozen=True)
class Candidates:
    """The samples of one prompt that can be scored."""

    comparison: Comparison  # the data's comparison, with the samples as responses, without labels
    numbers: tuple[int, ...]  # numbers of the samples, as in `prb sample`
    reference: str  # response with the highest label in the data

    def at(self, places: Iterable[int]) -> Candidates:
        """Return some of the samples."""
        places = list(places)
        texts = [self.comparison.responses[place] for place in places]
        comparison = replace(self.comparison, responses=texts)
        return replace(self, comparison=comparison, numbers=tuple(self.numbers[place] for place in places))

    @property
    def id(self) -> str:
        """The id of the comparison."""
        return self.comparison.id


@dataclass(frozen=True)
class DrawnCandidates:
    """The samples of a run of `prb sample`, or of a file of texts from any source."""

    run: Mapping[str, Any]  # how the samples were drawn, if known: `run.json` of the run
    prompts: list[Candidates]  # prompts with a sample that can be scored
    left_out: list[str]  # ids of the other prompts
    empty: int  # number of samples without a letter


def read_candidates(path: Path, data: Sequence[str] | None) -> DrawnCandidates:
    """Return the samples of a finished run of `prb sample`, or of a file of {id, sample, text}.

    Args:
      path: Path of the run or the file.
      data: Data of the samples; for a run, only if renamed since.

    Raises:
      DataError: the samples belong to other data, or all samples are empty.
      RunError: a run is not finished, or a row cannot be read.
    """
    if path.is_file():
        run, rows = _read_file(path, data)
    else:
        run, rows = RUNS.read_finished(path), read_samples(path)
    names = list(data or ())
    if not names and not run.get("data"):
        raise DataError(f"{path}: its data came from Python: name it with --data")
    names = names or recorded_sources(run["data"], where=str(path / RUN))
    drawn_from = run["inputs"].get("data")
    if drawn_from is None:
        comparisons = read_inputs(names).comparisons
        known = {comparison.id for comparison in comparisons}
        if strange := next((name for name, _ in rows if name not in known), None):
            raise DataError(
                f"{path}: {quote(strange)}: no comparison of {', '.join(map(str, names))} has this id"
            )
    else:
        read = read_inputs(names, subset=drawn_from.get("subset"), limit=run["inputs"]["limit"])
        comparisons = read.comparisons
        expected, actual = _contents(drawn_from), _contents(as_recorded(read.to_json()))
        if actual != expected:
            raise DataError(
                f"{path}: its samples are of other data than {', '.join(map(str, names))} now: expected "
                f"{quote(expected)}, found {quote(actual)}"
            )
    texts: dict[str, list[tuple[int, str]]] = {}
    for (name, number), row in rows.items():
        if row["text"].strip():
            texts.setdefault(name, []).append((number, row["text"]))
    prompts = []
    for comparison in comparisons:
        if samples := sorted(texts.get(comparison.id, ())):
            assert comparison.labels is not None
            reference = comparison.responses[int(np.argmax(comparison.labels))]
            asked = replace(comparison, responses=[text for _, text in samples], labels=None)
            prompts.append(Candidates(asked, tuple(number for number, _ in samples), reference))
    if not prompts:
        raise DataError(f"{path}: every sample is empty: there is nothing to choose from")
    left_out = [comparison.id for comparison in comparisons if comparison.id not in texts]
    return DrawnCandidates(run, prompts, left_out, len(rows) - sum(map(len, texts.values())))


def _read_file(
    path: Path, data: Sequence[str] | None
) -> tuple[dict[str, Any], Mapping[tuple[str, int], Row]]:
    """Return the known facts about the samples in a file, and its rows by comparison and number."""
    if not data:
        raise DataError(f"{path}: a file of samples requires its data: name it with --data")
    rows = dict(replace(SAMPLE_ROWS, schema=_TextLine, hint="correct the line").read(path))
    most = max(Counter(name for name, _ in rows).values(), default=0)
    digest = sha256(path.read_bytes()).hexdigest()
    return {"inputs": {"samples_sha256": digest, "sampling": {"n": most}, "model": {}}}, rows


def _contents(data: Mapping[str, Any]) -> Any:
    """Return the contents of data, without names."""
    files = [
        sorted(str(value) for value in (source.get("files") or {}).values())
        for source in data.get("sources", ())
    ]
    return {"comparisons": data.get("comparisons"), "sha256": data.get("sha256"), "files": files}
