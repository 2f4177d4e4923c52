"""One model's scores on their way into a run folder: what is there, what is missing, batch by batch."""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError, quote, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.processes.sharing import on_first_process, process_index
from prb_jax.runs.folder import RunFolder, append_computed, append_rows, open_run
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.scored import Scorer
from prb_jax.trees.tree import Truncation


@dataclass(frozen=True)
class ScoredRun:
    """An open run folder as all processes see it.

    Attributes:
      folder: on process 0, which alone writes; None elsewhere.
      rows: finished rows by id, the same in every process.
    """

    folder: RunFolder | None
    rows: dict[str, ScoredRow]

    __repr__ = short_repr

    def lacks(self, comparisons: Sequence[Comparison]) -> bool:
        """Whether any of them has no score yet."""
        return any(comparison.id not in self.rows for comparison in comparisons)

    def score(
        self,
        scorer: Scorer,
        comparisons: Sequence[Comparison],
        *,
        label: str,
        progress: bool,
        options: Mapping[str, Any],
        shown: Sequence[Comparison] | None = None,
    ) -> None:
        """Score what is missing; every batch is on disk before the next one is waited for.

        Args:
          scorer: the model.
          comparisons: to be scored; their rows are written.
          label, progress: of the display.
          options: of the stream of scores.
          shown: what the scorer gets in place of each comparison, if it is something else.
        """
        seen = comparisons if shown is None else shown
        for batch in _batches(
            scorer, comparisons, self.rows, shown=seen, label=label, progress=progress, options=options
        ):
            rows, computed = batch.rows, batch.computed
            if self.folder is not None:
                if computed is not None:
                    append_computed(self.folder, member=batch.first, tokens=computed)
                append_rows(self.folder, rows)
            self.rows.update((row.id, row) for row in rows)


@contextlib.contextmanager
def open_scored_run(
    out: str | Path, *, inputs: Mapping[str, Any], session: Mapping[str, Any], notes: Mapping[str, Any]
) -> Iterator[ScoredRun]:
    """Opens the folder on process 0 and tells every process what is in it; a collective.

    Arguments and errors as of `open_run`.
    """
    with contextlib.ExitStack() as stack:
        opened: list[RunFolder] = []

        def open_folder() -> dict[str, dict[str, Any]]:
            opened.append(stack.enter_context(open_run(out, inputs=inputs, session=session, notes=notes)))
            return {name: asdict(row) for name, row in opened[0].rows.items()}

        rows = {name: ScoredRow(**row) for name, row in on_first_process(open_folder).items()}
        yield ScoredRun(opened[0] if opened else None, rows)


@dataclass(frozen=True)
class _Batch:
    """The new rows of one batch, the id of its first comparison, and the tokens that it took."""

    rows: list[ScoredRow]
    first: str
    computed: int | None


def _batches(
    scorer: Scorer,
    comparisons: Sequence[Comparison],
    known: Mapping[str, ScoredRow],
    *,
    shown: Sequence[Comparison],
    label: str,
    progress: bool,
    options: Mapping[str, Any],
) -> Generator[_Batch]:
    """The rows of one batch after another, without the batches whose rows are all known."""
    finished = [comparison.id in known for comparison in comparisons]
    batches = scorer.stream(shown, skip=lambda indices: all(finished[index] for index in indices), **options)
    count = Count(len(comparisons), sum(finished))
    with show_progress(label, count, enabled=progress and process_index() == 0) as display:
        for batch in batches:
            rows = [
                scored_row(comparisons[index], scores, tokens, truncation)
                for index, scores, tokens, truncation in zip(
                    batch.indices, batch.scores, batch.tokens, batch.truncation, strict=True
                )
                if not finished[index]
            ]
            yield _Batch(rows, comparisons[batch.indices[0]].id, batch.computed)
            display.advance(len(rows), sum(row.tokens for row in rows))


def scored_row(comparison: Comparison, scores: np.ndarray, tokens: int, truncation: Truncation) -> ScoredRow:
    """The row of one comparison.

    Raises:
      RunError: another number of scores than of labels.
    """
    labels = comparison.labels or ()
    if len(scores) != len(labels):
        raise RunError(
            f"comparison {quote(comparison.id)}: the model gave {len(scores)} scores, expected {len(labels)}"
        )
    return ScoredRow(
        id=comparison.id,
        subset=comparison.subset,
        user_id=comparison.user_id,
        scores=[float(score) for score in scores],
        labels=list(labels),
        tokens=int(tokens),
        truncated=asdict(truncation) if truncation.any else 0,
    )
