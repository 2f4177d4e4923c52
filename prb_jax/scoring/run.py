"""One run of a model: what it is, and its rows on their way into the run folder."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from prb_jax.errors import PrbWarning, RunError, quote, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import RowTable, RowView
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.processes.agreement import check_agreement
from prb_jax.platform.processes.sharing import (
    entered_on_first_process,
    on_first_process,
    process_count,
    refuse_together,
)
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Items
from prb_jax.records.options import options_of
from prb_jax.runs.evaluation import SCORE_ROWS, EvaluationFolder, open_evaluation
from prb_jax.runs.kind import devices_of, session_now
from prb_jax.runs.parts import Skip
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import share_rows
from prb_jax.scoring.inputs import Inputs
from prb_jax.scoring.job import Job
from prb_jax.scoring.load import Model, model_contents
from prb_jax.scoring.remote import is_url
from prb_jax.scoring.scorer import Scorer
from prb_jax.trees.tree import has_equal_sides
from prb_jax.version import computing_versions

if TYPE_CHECKING:
    from jax.sharding import Mesh

_HANDFUL: Final = 9  # comparisons, of which equal scores are a warning


@dataclass(frozen=True)
class ScoredRun:
    """An open run folder as all processes see it."""

    job: Job
    folder: EvaluationFolder | None  # on process 0, which alone writes; None elsewhere
    scores: RowTable  # finished rows by id, the same in every process

    __repr__ = short_repr

    @property
    def rows(self) -> Sequence[ScoredRow]:
        """The rows in the order of the comparisons; of a part those that it has."""
        ids = self.job.table.ids if self.job.part is None else list(self.scores)
        return RowView(self.scores, ids)

    def score(self, *, batch_tokens: int | None, progress: bool) -> None:
        """Score what is missing. Every batch is on disk before the next one is waited for.

        The whole table is known afterwards. Of files that are read meanwhile the folder knows a block before its
        scores.

        Raises:
          RunError: the folder cannot be written, or the model gave another number of scores than there are labels.
          PrbError: as of the scorer.
        """
        job, table, before = self.job, self.job.table, len(self.scores)
        reading = job.inputs.reading if job.control is None else []

        def is_finished(index: int) -> bool:
            place = self.scores.place(table.id(index)) if before else None
            return place is not None and place < before

        def are_finished(indices: Sequence[int]) -> bool:
            if before:  # of large files the scorer may not have read them yet
                table.advance(max(indices, default=-1) + 1)
            return before > 0 and all(map(is_finished, indices))

        skip = Skip(are_finished, job.part)
        batches = job.scorer.stream(job.shown, view=job.view, batch_tokens=batch_tokens, skip=skip)
        count, label = Count(0, before), ", ".join(filter(None, (job.name, job.control)))
        _estimate(count, job.shown)
        with show_progress(label, count, enabled=progress) as display:
            for batch in batches:
                table.advance(max(batch.indices, default=-1) + 1)
                rows = []
                for index, scores, tokens, cut in zip(
                    batch.indices, batch.scores, batch.tokens, batch.truncation, strict=True
                ):
                    if is_finished(index):
                        continue
                    if len(scores) != (expected := len(table.labels[index])):
                        raise RunError(
                            f"comparison {quote(table.id(index))}: the model gave {len(scores)} scores, expected "
                            f"{expected}"
                        )
                    if not np.isfinite(scores).all():
                        raise RunError(
                            f"comparison {quote(table.id(index))}: the model gave the scores "
                            f"{np.asarray(scores).tolist()}; expected finite numbers{explanation(job.scorer)}"
                        )
                    truncated = asdict(cut) if cut.any else 0
                    rows.append(
                        table.row(index, list(map(float, scores)), tokens=int(tokens), truncated=truncated)
                    )
                if self.folder is not None:
                    if batch.computed is not None:
                        equal = [
                            table.id(index)
                            for index, equal_to in zip(batch.indices, batch.equal_to)
                            if has_equal_sides(equal_to, table.labels[index])
                        ]
                        first = table.id(batch.indices[0])
                        self.folder.append_computed(member=first, tokens=batch.computed, equal=equal)
                    self.folder.append_blocks([file.digests for file in reading])
                    self.folder.file.append(rows)
                self.scores.update((row.id, row) for row in rows)
                _estimate(count, job.shown)
                display.advance(len(rows), sum(row.tokens for row in rows))
        table.complete()

    def settle(self, decided: Mapping[str, Any]) -> None:
        """Write what decides the result into the record, now that all files are read; a collective."""
        on_first_process(lambda: None if self.folder is None else self.folder.settle(decided))


@contextlib.contextmanager
def open_scored_run(job: Job, out: str | Path, *, session: Mapping[str, Any]) -> Iterator[ScoredRun]:
    """Opens the folder on process 0 and tells every process what is in it; a collective.

    Arguments and errors as of `open_evaluation`. Files that are read while they are scored are compared with what the
    folder knows of them.
    """
    reading = job.inputs.reading if job.control is None else []
    facts: dict[str, Any] = {"inputs": job.decided, "session": session, "notes": job.notes}
    opens = partial(open_evaluation, out, **facts, by_blocks=bool(reading))
    with entered_on_first_process(opens, EvaluationFolder.known_blocks) as (folder, blocks):
        for file, digests in zip(reading, blocks, strict=False):
            file.expect(digests)
        file = share_rows(SCORE_ROWS, Path(out), folder and folder.file)
        yield ScoredRun(job, folder, cast(RowTable, file.rows))


def explanation(scorer: Scorer) -> str:
    """Return which weights of a model may be why its scores cannot be used, as the end of a message."""
    explained = scorer.explain_scores()
    return f": {explained}" if explained else ""


def check_scores_differ(run: ScoredRun) -> None:
    """Check that a model of weights does not give all texts the same score.

    Raises:
      RunError: it does; of a handful of comparisons this is a warning.
    """
    if run.job.scorer.reader is None or not run.job.inputs.comparisons.in_memory:
        return
    scores = (score for row in run.rows for score in row.scores)
    first = next(scores, None)
    if first is None or any(score != first for score in scores):
        return
    comparisons = run.job.inputs.comparisons
    texts = ((comparison.prompt, text) for comparison in comparisons for text in comparison.responses)
    if (one := next(texts, None)) is None or all(text == one for text in texts):
        return
    message = (
        f"{run.job.name}: gives every response the same score, {first}, over different texts"
        f"{explanation(run.job.scorer)}"
    )
    if len(comparisons) > _HANDFUL:
        raise RunError(f"{message}. Its figures would say nothing of a model that works")
    warnings.warn(message, PrbWarning, stacklevel=2)


def _estimate(count: Count, comparisons: Items[Comparison]) -> None:
    """Say how many comparisons there are, or about how many while that is not known."""
    count.about, count.total = not comparisons.complete, round(comparisons.about())


def mesh_facts(mesh: Mesh, attention: str | None = None) -> dict[str, Any]:
    """Return the shape and devices of a mesh, and the attention of the programs on it."""
    return {"mesh": dict(mesh.shape), "attention": attention, "devices": devices_of(mesh)}


def session_facts(scorer: Scorer, batch_tokens: int | None) -> dict[str, Any]:
    """Return how the run is done this time; results do not depend on it."""
    session: dict[str, Any] = {**session_now(), "batch_tokens": batch_tokens}
    return session if scorer.mesh is None else session | mesh_facts(scorer.mesh, scorer.attention)


def check_same_choices(
    verb: str,
    models: Mapping[str, tuple[Model, LoadOptions | None]],
    chosen: Mapping[str, Any],
    *,
    inputs: Inputs | None = None,
) -> None:
    """Compare the choices of several processes before a model is loaded: unequal ones may wait for ever.

    Args:
      models: that it will load, and how, by what they are for.
      chosen: everything else that was chosen, JSON-ready; of files their contents.

    Raises:
      RunError: in every process: a model behind a server, which one process alone asks; or the first process that
        differs from process 0, and the fields.
    """
    if process_count() == 1:
        return
    refuse_together(endpoint=next((model for model, _ in models.values() if is_url(model)), None))
    alike = [name for name, choice in options_of(LoadOptions).items() if choice.effect == "result"]
    asked = {what: (model, loading or LoadOptions()) for what, (model, loading) in models.items()}
    check_agreement(
        {
            "verb": verb,
            **chosen,
            "data": None if inputs is None else inputs.to_json(whole=False),
            "models": {
                what: {
                    "contents": model_contents(model, loading),
                    **{name: str(getattr(loading, name)) for name in alike},
                }
                for what, (model, loading) in asked.items()
            },
            "versions": computing_versions(plain=False),
        }
    )
