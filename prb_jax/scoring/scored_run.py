"""One model's scores on their way into a run folder: what is there, what is missing, batch by batch."""

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError, quote, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import RowTable
from prb_jax.processes.sharing import on_first_process, process_count, process_index, share_json
from prb_jax.runs.folder import RunFolder, append_computed, append_rows, open_run
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.facts import Facts
from prb_jax.scoring.scored import Scorer
from prb_jax.trees.tree import Truncation

_SHARED = 10_000
"""Rows that are told to the other processes at a time."""


@dataclass(frozen=True)
class ScoredRun:
    """An open run folder as all processes see it.

    Attributes:
      folder: on process 0, which alone writes; None elsewhere.
      rows: finished rows by id, the same in every process.
    """

    folder: RunFolder | None
    rows: RowTable

    __repr__ = short_repr

    def lacks(self, facts: Facts) -> bool:
        """Whether any of the comparisons, all of which are known, has no score yet."""
        return any(name not in self.rows for name in facts.ids)

    def score(
        self,
        scorer: Scorer,
        comparisons: Sequence[Comparison],
        facts: Facts,
        *,
        label: str,
        progress: bool,
        options: Mapping[str, Any],
    ) -> None:
        """Score what is missing; every batch is on disk before the next one is waited for.

        All facts are known afterwards.
        """
        batches = _batches(
            scorer, comparisons, facts, self.rows, label=label, progress=progress, options=options
        )
        for batch in batches:
            if self.folder is not None:
                if batch.computed is not None:
                    append_computed(self.folder, member=batch.first, tokens=batch.computed)
                append_rows(self.folder, batch.rows)
            self.rows.update((row.id, row) for row in batch.rows)
        facts.advance(len(comparisons))


@contextlib.contextmanager
def open_scored_run(
    out: str | Path, *, inputs: Mapping[str, Any], session: Mapping[str, Any], notes: Mapping[str, Any]
) -> Iterator[ScoredRun]:
    """Opens the folder on process 0 and tells every process what is in it; a collective.

    Arguments and errors as of `open_run`.
    """
    with contextlib.ExitStack() as stack:
        opened: list[RunFolder] = []

        def open_folder() -> int:
            opened.append(stack.enter_context(open_run(out, inputs=inputs, session=session, notes=notes)))
            return len(opened[0].rows)

        count = on_first_process(open_folder)
        if opened:
            rows = opened[0].rows
            for start in range(0, count, _SHARED) if process_count() > 1 else ():
                share_json([asdict(row) for row in islice(rows.values(), start, start + _SHARED)])
        else:
            rows = RowTable()
            for _ in range(0, count, _SHARED):
                for row in share_json(None):
                    rows[row["id"]] = ScoredRow(**row)
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
    facts: Facts,
    known: RowTable,
    *,
    label: str,
    progress: bool,
    options: Mapping[str, Any],
) -> Generator[_Batch]:
    """The rows of one batch after another, without the batches whose rows are all known."""
    before = len(known)

    def is_finished(index: int) -> bool:
        if not before:
            return False
        facts.advance(index + 1)
        place = known.place(facts.id(index))
        return place is not None and place < before

    batches = scorer.stream(comparisons, skip=lambda indices: all(map(is_finished, indices)), **options)
    shown = progress and process_index() == 0
    with show_progress(label, Count(len(comparisons), before), enabled=shown) as display:
        for batch in batches:
            facts.advance(max(batch.indices, default=-1) + 1)
            rows = [
                scored_row(facts, index, scores, tokens, truncation)
                for index, scores, tokens, truncation in zip(
                    batch.indices, batch.scores, batch.tokens, batch.truncation, strict=True
                )
                if not is_finished(index)
            ]
            yield _Batch(rows, facts.id(batch.indices[0]), batch.computed)
            display.advance(len(rows), sum(row.tokens for row in rows))


def scored_row(
    facts: Facts, index: int, scores: np.ndarray, tokens: int, truncation: Truncation
) -> ScoredRow:
    """The row of one comparison.

    Raises:
      RunError: another number of scores than of labels.
    """
    labels = facts.labels(index)
    if len(scores) != len(labels):
        raise RunError(
            f"comparison {quote(facts.id(index))}: the model gave {len(scores)} scores, expected {len(labels)}"
        )
    return facts.row(
        index,
        [float(score) for score in scores],
        tokens=int(tokens),
        truncated=asdict(truncation) if truncation.any else 0,
    )
