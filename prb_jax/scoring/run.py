"""One run of a model: what decides its result, and its rows on their way into the run folder."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.lines import JsonLines
from prb_jax.errors import RunError, quote, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import RowTable
from prb_jax.processes.sharing import on_first_process, process_count, process_index, share_json
from prb_jax.runs.evaluation import EvaluationFolder, open_evaluation
from prb_jax.runs.parts import Part, Skip
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.comparison_table import ComparisonTable
from prb_jax.scoring.scorer import Scorer
from prb_jax.sources.large import LargeComparisons
from prb_jax.text.view import View
from prb_jax.trees.tree import Truncation
from prb_jax.version import versions


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """All that decides the result of an evaluation.

    Attributes:
      model: the identity of the scorer, without its name where there is more.
      data: what the comparisons are made of.
      view: what is shown of them.
      limit: comparisons of each source.
      seed: of the resampling of benchmark scores.
      versions: of the packages that compute.
      too_long: what happens to a response that leaves no room for its prompt.
      wording: what else the prompt says, beside the view: `View.wording`.
      control: the name of the control, where the model is shown something else than the comparisons.
      hints: `Inputs.hints`: what else the model is told of the users.
      part: of the batches, where the run is one of several jobs.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    view: View
    limit: int | None
    seed: int
    versions: Mapping[str, str | None]
    too_long: str
    wording: Mapping[str, str] = field(default_factory=dict)
    control: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    part: Part | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `run.json` holds."""
        return {
            "model": self.model,
            "data": self.data,
            **shown_view(self.view),
            **self.wording,
            "limit": self.limit,
            "seed": self.seed,
            "versions": self.versions,
            **({} if self.too_long == "error" else {"too_long": self.too_long}),
            **({} if self.control is None else {"control": self.control}),
            **({"hints": self.hints} if self.hints else {}),
            **({} if self.part is None else {"part": str(self.part)}),
        }


def shown_view(view: View) -> dict[str, Any]:
    """Return a view as the keywords of `Scorer.stream`, JSON-ready."""
    return {
        "protocol": view.protocol.value,
        "profile_posts": view.profile_posts,
        "max_length": view.max_length,
    }


def computing_versions(*, plain: bool) -> dict[str, str | None]:
    """Return the versions of everything that computes; `plain` for a scorer without weights."""
    packages = ("numpy",) if plain else ("numpy", "jax", "jaxlib", "flax", "transformers", "tokenizers")
    return versions(packages)


def session_facts(scorer: Scorer, batch_tokens: int | None) -> dict[str, Any]:
    """Return how the run is done this time; results do not depend on it."""
    session: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "batch_tokens": batch_tokens,
    }
    mesh = getattr(scorer, "mesh", None)
    if mesh is not None:
        devices = mesh.devices.flatten().tolist()
        session["mesh"] = dict(mesh.shape)
        session["attention"] = getattr(scorer, "attention", None)
        session["devices"] = {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": process_count(),
        }
    return session


_SHARED = 10_000
"""Rows that are told to the other processes at a time."""


@dataclass(frozen=True)
class ScoredRun:
    """An open run folder as all processes see it.

    Attributes:
      folder: on process 0, which alone writes; None elsewhere.
      rows: finished rows by id, the same in every process.
      blocks: of the folder, the same in every process.
    """

    folder: EvaluationFolder | None
    rows: RowTable
    blocks: Sequence[Sequence[str]] = ()

    __repr__ = short_repr

    def score(
        self,
        scorer: Scorer,
        comparisons: Sequence[Comparison],
        table: ComparisonTable,
        *,
        label: str,
        progress: bool,
        options: Mapping[str, Any],
        reading: Sequence[JsonLines] = (),
        part: Part | None = None,
    ) -> None:
        """Score what is missing, of a part of the batches if there is one.

        Every batch is on disk before the next one is waited for.

        The whole table is known afterwards. Of files that are read meanwhile the folder knows a block before its
        scores.

        Raises:
          RunError: the folder cannot be written, or the model gave another number of scores than there are labels.
          PrbError: as of the scorer.
        """
        before = len(self.rows)

        def is_finished(index: int) -> bool:
            place = self.rows.place(table.id(index)) if before else None
            return place is not None and place < before

        def are_finished(indices: Sequence[int]) -> bool:
            if not before:
                return False
            table.advance(
                max(indices, default=-1) + 1
            )  # of large files, where the scorer did not read them yet
            return all(map(is_finished, indices))

        count = Count(0, before)
        _estimate(count, comparisons)
        batches = scorer.stream(comparisons, skip=Skip(are_finished, part), **options)
        with show_progress(label, count, enabled=progress and process_index() == 0) as display:
            for batch in batches:
                table.advance(max(batch.indices, default=-1) + 1)
                values = zip(batch.indices, batch.scores, batch.tokens, batch.truncation, strict=True)
                rows = [_scored_row(table, *value) for value in values if not is_finished(value[0])]
                if self.folder is not None:
                    if batch.computed is not None:
                        first = table.id(batch.indices[0])
                        self.folder.append_computed(member=first, tokens=batch.computed)
                    self.folder.append_blocks([file.digests for file in reading])
                    self.folder.file.append(rows)
                self.rows.update((row.id, row) for row in rows)
                _estimate(count, comparisons)
                display.advance(len(rows), sum(row.tokens for row in rows))
        table.complete()

    def settle(self, inputs: Mapping[str, Any]) -> None:
        """Record what the data is, as it was read to its end; a collective.

        Raises:
          RunError: the folder says something else.
        """
        on_first_process(lambda: None if self.folder is None else self.folder.settle(inputs))


@contextlib.contextmanager
def open_scored_run(
    out: str | Path,
    *,
    inputs: Mapping[str, Any],
    session: Mapping[str, Any],
    notes: Mapping[str, Any],
    by_blocks: bool = False,
) -> Iterator[ScoredRun]:
    """Opens the folder on process 0 and tells every process what is in it; a collective.

    Arguments and errors as of `open_evaluation`.
    """
    with contextlib.ExitStack() as stack:
        opened: list[EvaluationFolder] = []

        def open_folder() -> tuple[int, list[list[str]]]:
            run = open_evaluation(out, inputs=inputs, session=session, notes=notes, by_blocks=by_blocks)
            opened.append(stack.enter_context(run))
            return len(opened[0].file.rows), opened[0].known_blocks()

        count, blocks = on_first_process(open_folder)
        if opened:
            rows = cast(RowTable, opened[0].file.rows)
            for start in range(0, count, _SHARED) if process_count() > 1 else ():
                share_json([asdict(row) for row in islice(rows.values(), start, start + _SHARED)])
        else:
            rows = RowTable()
            for _ in range(0, count, _SHARED):
                for row in share_json(None):
                    rows[row["id"]] = ScoredRow(**row)
        yield ScoredRun(opened[0] if opened else None, rows, blocks)


def _estimate(count: Count, comparisons: Sequence[Comparison]) -> None:
    """Say how many comparisons there are, or about how many while that is not known."""
    count.about = isinstance(comparisons, LargeComparisons) and not comparisons.complete
    if count.about and isinstance(comparisons, LargeComparisons):
        count.total = round(comparisons.about())
    else:
        count.total = len(comparisons)


def _scored_row(
    table: ComparisonTable, index: int, scores: np.ndarray, tokens: int, truncation: Truncation
) -> ScoredRow:
    labels = table.labels(index)
    if len(scores) != len(labels):
        raise RunError(
            f"comparison {quote(table.id(index))}: the model gave {len(scores)} scores, expected {len(labels)}"
        )
    return table.row(
        index,
        [float(score) for score in scores],
        tokens=int(tokens),
        truncated=asdict(truncation) if truncation.any else 0,
    )
