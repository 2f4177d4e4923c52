"""The folder of one run: killed at any moment, continued by the same command.

``run.json``      what was run. Its ``inputs`` decide the result: a run is continued only with equal
                  inputs. Its ``sessions`` (devices, mesh, batch sizes, time) say how, one entry for
                  each time that the run was started; they may differ, results do not depend on them.
``scores.jsonl``  one row for each comparison. Appended in the order of completion, a whole row at a
                  time; when the last one is there, rewritten once in the order of the input.
``blocks.jsonl``  while data larger than memory is read: the digests of what was read, see `prb_jax.runs.open_inputs`.
``computed.jsonl``  until the run is finished: for each batch of a model a comparison in it, and the tokens computed;
                  their sum then stands in ``run.json``.
``summary.json``  written last: a folder that has it is finished.

Every file but the growing ``scores.jsonl`` is written to a temporary name and renamed. A kill can
leave at most one torn line, the last one, which is dropped and scored again. Other files in the
folder are left alone.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from prb_jax.data.reading import parse_json
from prb_jax.data.writing import held_folder, json_line, refuse_file, whole_file, write_json, writing
from prb_jax.errors import RunError, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import RowTable, RowView
from prb_jax.runs.kind import RUN, RunKind, as_recorded, check_same_inputs
from prb_jax.runs.open_inputs import filled, is_open, read_blocks, remove_blocks

SCORES = "scores.jsonl"
JUDGEMENTS = "judgements.jsonl"
"""A row for each comparison that a judge judged: its verdicts or ratings, and its replies."""
COMPUTED = "computed.jsonl"
COMPUTED_TOKENS = "computed_tokens"
KIND = "prb_jax evaluation"
EVALUATION = RunKind(KIND, "prb evaluate", rows=SCORES)
_ROW = {item.name for item in fields(ScoredRow)}
_SECONDS_BETWEEN_SYNCS = 1.0
_LARGEST_COUNT = 1 << 62


@dataclass(frozen=True)
class RunFolder:
    """An open run folder, locked against a second writer.

    ``rows`` holds the finished rows by id, in the order in which they lie on disk; ``blocks``, for each file of data
    that is not read to its end, the digests of the blocks that the rows may be of.
    """

    path: Path
    rows: RowTable
    blocks: list[list[bytes]]
    _scores: int = field(repr=False)
    _synced: list[float] = field(default_factory=lambda: [time.monotonic()], repr=False)


@contextlib.contextmanager
def open_run(
    out: str | Path,
    *,
    inputs: Mapping[str, Any],
    session: Mapping[str, Any],
    notes: Mapping[str, Any],
    by_blocks: bool = False,
) -> Iterator[RunFolder]:
    """Creates the folder of a run, or opens it to continue.

    Args:
      out: the folder; made, with its parents, where it does not exist.
      inputs: everything that decides the result; compared with the folder's own when the run is continued.
      session: how it is run this time; added to ``sessions`` when there is anything left to score.
      notes: what else should stand in ``run.json``; written once, not compared.
      by_blocks: whether the caller compares the data with ``RunFolder.blocks`` where the folder leaves it open.

    Raises:
      RunError: ``out`` is a file or cannot be written; another process is writing to it; it holds another run
        (each differing field is named, with both values) or scores without ``run.json``.
    """
    path = Path(out)
    check_folder(path)
    with held_folder(path):
        wanted = as_recorded(inputs)
        found = EVALUATION.read(path)
        rows = read_scores(path / SCORES)
        blocks: list[list[bytes]] = []
        if found is not None and rows:
            known = found["inputs"]
            check_same_inputs(path, filled(known, wanted), filled(wanted, known))
            if is_open(known):
                if not by_blocks:
                    raise RunError(
                        f"{path} holds a run that stopped before its data was read to the end, so that nothing tells "
                        "whether a prepared copy has the same contents: continue it with the files that it began "
                        "with, or give --out another folder"
                    )
                blocks = read_blocks(path)
        elif found is not None and found["inputs"] != wanted:
            found = None  # it stopped before its first score: there is nothing to keep
            with writing(path / COMPUTED):
                (path / COMPUTED).unlink(missing_ok=True)
        if not blocks:
            remove_blocks(path)
        EVALUATION.record(path, found, inputs=wanted, session=session, notes=notes)
        with writing(path / SCORES):
            scores = os.open(path / SCORES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            yield RunFolder(path=path, rows=rows, blocks=blocks, _scores=scores)
        finally:
            os.close(scores)


def is_settled(out: str | Path) -> bool:
    """Whether a folder holds scores of data that is known as a whole, with which that at hand has to be compared first.

    Raises:
      RunError: the folder holds something else.
    """
    path = Path(out)
    try:
        scored = (path / SCORES).stat().st_size > 0
    except OSError:
        return False
    found = EVALUATION.read(path) if scored else None
    return found is not None and not is_open(found["inputs"])


def settle_inputs(run: RunFolder, inputs: Mapping[str, Any]) -> None:
    """Say in ``run.json`` what the data is, now that it was read to its end.

    Raises:
      RunError: it says something else already.
    """
    found, wanted = EVALUATION.read(run.path) or {"inputs": {}}, as_recorded(inputs)
    check_same_inputs(run.path, filled(found["inputs"], wanted), wanted)
    if found["inputs"] != wanted:
        write_json(run.path / RUN, {**found, "inputs": wanted})
    remove_blocks(run.path)


def check_folder(out: str | Path) -> None:
    """Refuses what no run could be written to, before anything costly is done.

    Raises:
      RunError: ``out`` is a file, or holds something else than a run.
    """
    path = Path(out)
    refuse_file(out)
    if path.is_dir():
        EVALUATION.read(path)


def append_rows(run: RunFolder, rows: Iterable[ScoredRow]) -> None:
    """Adds the rows that are not there yet. They survive a kill of the process from here on.

    They survive a loss of power after about a second: the disk is not waited for at every batch.

    Raises:
      RunError: a score that is not finite (naming the id), or a row that cannot be written.
    """
    new = [row for row in rows if row.id not in run.rows]
    if not new:
        return
    data = b"".join(_line(row) for row in new)
    path = run.path / SCORES
    with writing(path):
        before = os.fstat(run._scores).st_size
        try:
            _write_all(run._scores, data)
        except OSError:
            with contextlib.suppress(OSError):  # a torn line would be dropped on reading anyway
                os.ftruncate(run._scores, before)
            raise
        now = time.monotonic()
        if now - run._synced[0] >= _SECONDS_BETWEEN_SYNCS:
            os.fsync(run._scores)
            run._synced[0] = now
    run.rows.update((row.id, row) for row in new)


def append_computed(run: RunFolder, *, member: str, tokens: int) -> None:
    """Note how many tokens the batch with this comparison takes, before its rows are added.

    A batch that is computed again has the same line again, which counts once.

    Raises:
      RunError: the line cannot be written.
    """
    path = run.path / COMPUTED
    with writing(path), path.open("ab") as file:
        # A torn line of a session that was killed stays alone.
        file.write(b"\n" + json.dumps([member, tokens]).encode() + b"\n")


def computed_tokens(run: RunFolder) -> int | None:
    """Return the tokens computed for all rows of a run; None where its scorer does not tell.

    Raises:
      RunError: the file cannot be read.
    """
    path = run.path / COMPUTED
    if not path.exists():
        return (EVALUATION.read(run.path) or {}).get(COMPUTED_TOKENS)
    with writing(path):
        lines = path.read_bytes().split(b"\n")[:-1]
    found: dict[str, int] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # empty, or torn: its batch was computed again
            member, tokens = json.loads(line)
            found[member] = tokens
    return sum(found.values())


def settle_computed(run: RunFolder, tokens: int) -> None:
    """Keep the number of computed tokens in ``run.json``, and remove the file of :func:`append_computed`."""
    write_json(run.path / RUN, {**(EVALUATION.read(run.path) or {}), COMPUTED_TOKENS: tokens})
    with writing(run.path / COMPUTED):
        (run.path / COMPUTED).unlink(missing_ok=True)


def finish_scores(run: RunFolder, *, ids: Sequence[str]) -> Sequence[ScoredRow]:
    """Puts ``scores.jsonl`` into the order of ``ids``, so that its bytes do not depend on batches.

    Raises:
      RunError: a row is missing, or the file holds rows of comparisons that are not in this run.
    """
    path = run.path / SCORES
    missing = [name for name in ids if name not in run.rows]
    if missing:
        raise RunError(
            f"{path}: {len(missing)} of {len(ids)} comparisons have no score, first {quote(missing[0])}"
        )
    if len(run.rows) != len(ids):
        known = set(ids)
        extra = [name for name in run.rows if name not in known]
        raise RunError(
            f"{path}: {len(extra)} rows belong to no comparison of this run, first {quote(extra[0])}; "
            f"remove them, or start again in another folder"
        )
    rows = RowView(run.rows, ids)
    with writing(path):
        os.fsync(run._scores)
        if any(found != expected for found, expected in zip(run.rows, ids)):
            with whole_file(path) as file:
                file.writelines(_line(row) for row in rows)
    return rows


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _line(row: ScoredRow) -> bytes:
    scores = [float(score) for score in row.scores]
    if not all(math.isfinite(score) for score in scores):
        raise RunError(
            f"comparison {quote(row.id)}: the model gave the scores {scores}; expected finite numbers "
            f"(float16 and broken weights overflow; try --dtype float32)"
        )
    # float32 values written as the float64 they equal: reading them back gives the same bits.
    value = {
        "id": row.id,
        "subset": row.subset,
        "user_id": row.user_id,
        "scores": scores,
        "labels": [float(label) for label in row.labels],
        "tokens": row.tokens,
        "truncated": row.truncated,
    }
    return json_line(value)


def read_scores(path: Path) -> RowTable:
    """The whole rows of the file; a torn last line is cut off the file."""
    try:
        with path.open("rb") as file:
            rows = parse_scores(_whole_lines(file, path), path=path)
    except FileNotFoundError:
        return RowTable()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    return rows


def _whole_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a file; a torn last one is cut off it instead."""
    whole = 0
    for line in file:
        if not line.endswith(b"\n"):
            with writing(path):
                os.truncate(path, whole)
            return
        yield line
        whole += len(line)


def parse_scores(lines: Iterable[bytes], *, path: Path) -> RowTable:
    """Return the rows of a `scores.jsonl` by id, in its order.

    Args:
      lines: whole ones, of which one is held at a time.
      path: of the file, for messages.

    Raises:
      RunError: a line that is no row of scores, or a second row of one comparison.
    """
    rows = RowTable()
    for number, line in enumerate(lines, start=1):
        row = _read_row(line.removesuffix(b"\n"), where=f"{path}:{number}")
        if row.id in rows:
            raise RunError(f"{path}:{number}: a second row for {quote(row.id)}; remove one of them")
        rows[row.id] = row
    return rows


def _read_row(line: bytes, *, where: str) -> ScoredRow:
    hint = "remove the line, and the same command scores it again"
    row = parse_json(line, where=f"{where}: not a row of scores", error=RunError, hint=hint)
    if isinstance(row, dict) and row.keys() == _ROW and isinstance(row["id"], str):
        scores, labels = row["scores"], row["labels"]
        known = _are_numbers(scores) and _are_numbers(labels) and len(scores) == len(labels) >= 2
        if (
            known
            and _are_names(row["subset"], row["user_id"])
            and _are_counts(row["tokens"], row["truncated"])
        ):
            return ScoredRow(**row)
    raise RunError(f"{where}: not a row of scores; {hint}")


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)


def _are_names(*values: Any) -> bool:
    return all(value is None or isinstance(value, str) for value in values)


def _are_counts(tokens: Any, truncated: Any) -> bool:
    cuts = truncated.values() if isinstance(truncated, dict) else (truncated,)
    return all(type(value) is int and 0 <= value < _LARGEST_COUNT for value in (tokens, *cuts))
