"""One run of a model: what decides its result, and its rows on their way into the run folder."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.lines import JsonLines
from prb_jax.errors import RunError, quote, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import RowTable
from prb_jax.processes.sharing import on_first_process, process_count, process_index, share_json
from prb_jax.runs.folder import RunFolder, append_computed, append_rows, open_run, settle_inputs
from prb_jax.runs.open_inputs import append_blocks
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.comparison_table import Facts
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

    folder: RunFolder | None
    rows: RowTable
    blocks: Sequence[Sequence[bytes]] = ()

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
        reading: Sequence[JsonLines] = (),
    ) -> None:
        """Score what is missing; every batch is on disk before the next one is waited for.

        All facts are known afterwards. Of files that are read meanwhile the folder knows a block before its scores.
        """
        batches = _batches(
            scorer, comparisons, facts, self.rows, label=label, progress=progress, options=options
        )
        for batch in batches:
            if self.folder is not None:
                if batch.computed is not None:
                    append_computed(self.folder, member=batch.first, tokens=batch.computed)
                if reading:
                    append_blocks(self.folder.path, self.folder.blocks, [file.digests for file in reading])
                append_rows(self.folder, batch.rows)
            self.rows.update((row.id, row) for row in batch.rows)
        facts.advance()

    def settle(self, inputs: Mapping[str, Any]) -> None:
        """Record what the data is, as it was read to its end; a collective.

        Raises:
          RunError: the folder says something else.
        """
        on_first_process(lambda: None if self.folder is None else settle_inputs(self.folder, inputs))


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

    Arguments and errors as of `open_run`.
    """
    with contextlib.ExitStack() as stack:
        opened: list[RunFolder] = []

        def open_folder() -> int:
            run = open_run(out, inputs=inputs, session=session, notes=notes, by_blocks=by_blocks)
            opened.append(stack.enter_context(run))
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
        kept = [[digest.hex() for digest in file] for file in opened[0].blocks] if opened else None
        blocks = [[bytes.fromhex(digest) for digest in file] for file in share_json(kept)]
        yield ScoredRun(opened[0] if opened else None, rows, blocks)


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
        place = known.place(facts.id(index))
        return place is not None and place < before

    def are_finished(indices: Sequence[int]) -> bool:
        if not before:
            return False
        facts.advance(max(indices, default=-1) + 1)
        return all(map(is_finished, indices))

    batches = scorer.stream(comparisons, skip=are_finished, **options)
    shown = progress and process_index() == 0
    count = Count(0, before)
    _estimate(count, comparisons)
    with show_progress(label, count, enabled=shown) as display:
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
            _estimate(count, comparisons)
            display.advance(len(rows), sum(row.tokens for row in rows))


def _estimate(count: Count, comparisons: Sequence[Comparison]) -> None:
    """Say how many comparisons there are, or about how many while that is not known."""
    count.about = isinstance(comparisons, LargeComparisons) and not comparisons.complete
    if count.about and isinstance(comparisons, LargeComparisons):
        count.total = round(comparisons.about())
    else:
        count.total = len(comparisons)


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
