"""One run of a model: open its folder, score the comparisons of a job, and write the rows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from prb_jax.errors import RunError, quote, short_repr
from prb_jax.metrics.rows import RowTable, RowView, ScoredRow
from prb_jax.platform.processes.sharing import (
    entered_on_first_process,
    on_first_process,
)
from prb_jax.records.writing import write_json, writing
from prb_jax.runs.evaluation import BLOCKS, COMPUTED, COMPUTED_TOKENS, EVALUATION, SCORE_ROWS, is_open
from prb_jax.runs.kind import RUN, RunFolder, as_recorded, devices_of, session_now
from prb_jax.runs.rows import RowFile, share_rows
from prb_jax.scoring.inputs import Job
from prb_jax.scoring.scorer import Scorer
from prb_jax.seams import get
from prb_jax.trees.tree import EQUAL_SIDES, EqualSides, has_equal_sides

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from prb_jax.runs.blocks import Blocks


@dataclass(frozen=True)
class Computed:
    """Tokens and equal pairs that a model computed for a run."""

    tokens: int  # without padding
    equal_sides: EqualSides | None  # None if no comparison has equal sides


@dataclass(frozen=True)
class EvaluationFolder(RunFolder):
    """An open run folder of an evaluation."""

    # digests of the blocks read so far; None if the data is known as a whole
    blocks: Blocks | None

    def settle(self, inputs: Mapping[str, Any]) -> None:
        """Record in ``run.json`` the identity of the data, after it was read to its end.

        Raises:
          RunError: ``run.json`` records other data.
        """
        record, wanted = EVALUATION.read(self.path) or {"inputs": {}}, as_recorded(inputs)
        get("runs", "check inputs").value(self.path, *_compared(record["inputs"], wanted))
        if record["inputs"] != wanted:
            write_json(self.path / RUN, {**record, "inputs": wanted})
        _remove(self.path / BLOCKS)

    def append_computed(self, *, member: str, tokens: int, equal: Sequence[str]) -> None:
        """Append the tokens of the batch with this comparison, and its comparisons with equal sides, before its rows.

        A batch that is computed again appends the same line again, which counts once.
        """
        path = self.path / COMPUTED
        with writing(path), path.open("ab") as file:
            # The leading newline separates this line from a torn one of a killed session.
            file.write(b"\n" + json.dumps([member, tokens, *equal]).encode() + b"\n")

    def computed(self, ids: Iterable[str]) -> Computed | None:
        """Return the tokens and equal sides of all rows, for the comparisons' ids in order; None if the scorer does not
        report them."""
        path = self.path / COMPUTED
        if not path.exists():
            tokens, sides = self.record.get(COMPUTED_TOKENS), self.record.get(EQUAL_SIDES)
            return None if tokens is None else Computed(tokens, sides and EqualSides(**sides))
        with writing(path):
            lines = path.read_bytes().split(b"\n")[:-1]
        by_member: dict[str, int] = {}
        equal: set[str] = set()
        for line in lines:
            with contextlib.suppress(ValueError):  # empty or torn: a torn line's batch was computed again
                member, tokens, *names = json.loads(line)
                by_member[member] = tokens
                equal.update(names)
        sides = EqualSides.of(name for name in ids if name in equal) if equal else None
        return Computed(sum(by_member.values()), sides)

    def settle_computed(self, computed: Computed) -> None:
        """Store the sums in ``run.json``, and remove the file of single batches."""
        record = {**(EVALUATION.read(self.path) or {}), COMPUTED_TOKENS: computed.tokens}
        if computed.equal_sides is not None:
            record[EQUAL_SIDES] = asdict(computed.equal_sides)
        write_json(self.path / RUN, record)
        _remove(self.path / COMPUTED)


@contextlib.contextmanager
def open_evaluation(
    out: str | Path,
    *,
    inputs: Mapping[str, Any],
    session: Mapping[str, Any],
    notes: Mapping[str, Any],
    by_blocks: bool = False,
) -> Iterator[EvaluationFolder]:
    """Create the folder of an evaluation, or open it to continue.

    Args:
      out, inputs, session, notes: See `RunKind.open`.
      by_blocks: If True, the caller compares the data with the blocks if the folder does not identify the data yet.

    Raises:
      RunError: see `RunKind.open`; or the folder has scores, but not the blocks that identify their data.
    """

    def compared(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Any, Any]:
        both = _compared(recorded, wanted)
        if is_open(recorded) and not by_blocks and both[0] == both[1]:
            raise RunError(
                f"{out} holds a run that stopped before its data was read to the end, so it is unknown whether a "
                "prepared copy has the same contents: continue with the files that the run started with, or choose "
                "another folder with --out"
            )
        return both

    opened = EVALUATION.open(out, inputs, session=session, notes=notes, compared=compared)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(opened)
        unread = bool(run.file.rows) and is_open(run.record["inputs"])
        if not unread:
            _remove(run.path / BLOCKS)
        if not run.file.rows:
            _remove(run.path / COMPUTED)
        blocks = None
        if by_blocks:
            blocks = stack.enter_context(get("large data", "blocks").value(run.path))
        if unread and not (blocks and blocks.file.rows):
            raise RunError(
                f"{run.path / BLOCKS}: missing or empty, but scores exist; the file identifies their data: "
                "restore it, or choose another folder with --out"
            )
        yield EvaluationFolder(**vars(run), blocks=blocks)


def _remove(path: Path) -> None:
    with writing(path):
        path.unlink(missing_ok=True)


def _compared(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the inputs to compare: what is open in one is taken from the other."""
    if not (is_open(recorded) or is_open(wanted)):
        return recorded, wanted
    filled = get("large data", "filled").value
    return filled(recorded, wanted), filled(wanted, recorded)


@dataclass(frozen=True)
class ScoredRun:
    """An open run folder, shared by all processes."""

    job: Job
    folder: EvaluationFolder | None  # on process 0, the only writer; None on the others
    file: RowFile[ScoredRow]  # finished rows by id, the same in every process

    __repr__ = short_repr

    @property
    def rows(self) -> Sequence[ScoredRow]:
        """Rows in the order of the comparisons; for a part, only its rows."""
        ids = self.job.table.ids if self.job.part is None else list(self.file.rows)
        return RowView(self.file.rows, ids)

    def score(self, *, batch_tokens: int | None, progress: bool) -> None:
        """Score the missing rows and write each batch to disk before waiting for the next one.

        Afterwards the table is complete. For large files the folder records the digest of a block before its scores.

        Raises:
          RunError: The folder cannot be written, or the model returned a wrong number of scores or one that is not
            finite.
          PrbError: Errors of the scorer.
        """
        job, table, finished = self.job, self.job.table, cast(RowTable, self.file.rows)
        before = len(finished)

        def is_finished(index: int) -> bool:
            place = finished.place(table.id(index)) if before else None
            return place is not None and place < before

        def are_finished(indices: Sequence[int]) -> bool:
            if before:  # the scorer may not have read these rows of a large file yet
                table.advance(max(indices, default=-1) + 1)
            return before > 0 and all(map(is_finished, indices))

        skip = are_finished if job.part is None else job.part.skip(are_finished)
        batches = job.scorer.stream(job.shown, view=job.view, batch_tokens=batch_tokens, skip=skip)
        label = ", ".join(filter(None, (job.name, job.control)))
        with get("progress", "rows").value(label, job.shown, done=before, enabled=progress) as show:
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
                    if self.folder.blocks is not None:
                        self.folder.blocks.append([file.digests for file in job.reading])
                self.file.append(rows)
                show(rows)
        table.complete()

    def settle(self, decided: Mapping[str, Any]) -> None:
        """Write everything that decides the result to `run.json` after all files are read; a collective."""
        on_first_process(lambda: None if self.folder is None else self.folder.settle(decided))


@contextlib.contextmanager
def open_scored_run(job: Job, out: str | Path, *, session: Mapping[str, Any]) -> Iterator[ScoredRun]:
    """Open the folder on process 0 and send its rows to every process; a collective.

    Arguments and errors are as in `open_evaluation`. Large files are compared with the digests in the folder while they
    are read.
    """
    facts: dict[str, Any] = {"inputs": job.decided, "session": session, "notes": job.notes}
    opens = partial(open_evaluation, out, **facts, by_blocks=bool(job.reading))
    with entered_on_first_process(opens, lambda folder: folder.blocks and folder.blocks.known()) as (
        folder,
        blocks,
    ):
        for file, digests in zip(job.reading, blocks or (), strict=False):
            file.expect(digests)
        file = share_rows(SCORE_ROWS, Path(out), folder and folder.file)
        yield ScoredRun(job, folder, file)


def explanation(scorer: Scorer) -> str:
    """Return the end of a message: the weights that may explain unusable scores; empty if unknown."""
    explained = scorer.explain_scores()
    return f": {explained}" if explained else ""


def mesh_facts(mesh: Mesh, attention: str | None = None) -> dict[str, Any]:
    """Return the shape and devices of a mesh, and the attention of the programs on it."""
    return {"mesh": dict(mesh.shape), "attention": attention, "devices": devices_of(mesh)}


def session_facts(scorer: Scorer, batch_tokens: int | None) -> dict[str, Any]:
    """Return the facts of this session: mesh, devices and batch size, which do not change results."""
    session: dict[str, Any] = {**session_now(), "batch_tokens": batch_tokens}
    return session if scorer.mesh is None else session | mesh_facts(scorer.mesh, scorer.attention)
