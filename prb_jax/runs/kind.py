"""Run folders of any verb: a run can be killed at any moment, and the same command continues it.

``run.json`` (``train.json`` for training) records what was run. Its ``inputs`` decide the result: a run continues only
with equal inputs. Its ``sessions`` record how, one entry per start. ``summary.json`` is written last: a folder with it
is finished. Files are written to a temporary name and renamed, or grow by whole rows; other files in the folder are
never touched. ``run.json`` of a finished run has the digests of its files (``format`` 2), which are verified when the
files are read; folders of earlier versions (``format`` 1) have none.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict, cast

from prb_jax.errors import RunError, quote
from prb_jax.platform.paths import near_path, shown
from prb_jax.platform.processes.sharing import entered_on_first_process, on_first_process, process_count
from prb_jax.records.reading import read_json
from prb_jax.records.writing import held_folder, refuse_file, write_json, writing
from prb_jax.runs.rows import RowFile, RowKind, share_rows
from prb_jax.seams import get

RUN = "run.json"
SUMMARY = "summary.json"
FORMAT: Final = 2  # of the record of a finished run

Inputs = Mapping[str, Any]

_words: list[str] = []  # the command line of this process; empty in a program that calls the library


def command_line() -> list[str]:
    """Return the words of the command, `prb` first; empty if Python code made the call."""
    return list(_words)


def set_command_line(words: Sequence[str]) -> None:
    """Record these words in the runs that start from now on."""
    _words[:] = words


@dataclass(frozen=True)
class RunResult:
    """Result of a verb.

    Attributes:
      out: Run folder.
      summary: Contents of `summary.json`.
    """

    out: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """An open run folder, locked against a second writer."""

    path: Path  # the folder
    kind: RunKind  # kind of the run
    record: Mapping[str, Any] = field(repr=False)  # contents of `run.json`
    file: RowFile[Any] = field(repr=False)  # its file of rows; only if the kind has one

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as finished."""
        self.kind.finish(self.path, summary)


class Session(TypedDict, total=False):
    """One session of a run; sessions from `merge` lack the time."""

    started: str
    relax: list[str]
    settings: dict[str, Any]
    merged: list[dict[str, Any]]


class RunRecord(TypedDict):
    """Contents of ``run.json``."""

    kind: str
    inputs: dict[str, Any]
    format: NotRequired[int]
    command: NotRequired[list[str]]
    sessions: NotRequired[list[Session]]
    data: NotRequired[list[str] | str | None]
    samples: NotRequired[str]
    model: NotRequired[str | None]
    files: NotRequired[dict[str, str]]


@dataclass(frozen=True)
class RunKind:
    """Names, files and inputs of the run folders of one command."""

    name: str  # `kind` in ``run.json``
    command: str  # command that writes the folders, for messages
    # the file of rows: while it is empty, a run with other inputs replaces this one. None if runs are never
    # replaced.
    rows: RowKind[Any] | None = None
    file: str = RUN  # file that records what was run
    # files and folders that, without `file`, show that a folder holds something else
    others: tuple[str, ...] = ()
    finished: str = SUMMARY  # file that only finished runs have
    # TypedDict, or its "module:name": inputs that other code reads, and their types
    inputs: Any = dict[str, Any]
    # patterns of further files whose digests the record of a finished run has
    sealed: tuple[str, ...] = ()

    def check(self, out: str | Path) -> Path:
        """Return the path of a folder that a run of this kind may be written to; call before costly work.

        Raises:
          RunError: the path is a file, or holds something else than such a run.
        """
        refuse_file(out)
        self.read(Path(out))
        return Path(out)

    def read(self, folder: Path, *, hint: str = "choose another folder with --out") -> dict[str, Any] | None:
        """Return the contents of ``run.json``; None if the folder holds no run.

        Raises:
          RunError: the file cannot be read, or the folder holds another kind of run; ``hint`` ends the message.
        """
        path = folder / self.file
        run = read_json(path, error=RunError, hint=hint, optional=True)
        if run is None and not path.exists():
            for other in (*self.others, *([self.rows.file] if self.rows else []), self.finished):
                if (folder / other).exists():
                    raise RunError(
                        f"{folder} holds another run: it has {other} but no {self.file}, which `{self.command}` "
                        f"writes; {hint}"
                    )
            return None
        if not isinstance(run, dict) or run.get("kind") != self.name:
            raise RunError(f"{path}: not a record of `{self.command}`; {hint}")
        get("runs", "check record").value(self, run, where=str(path), hint=hint)
        return run

    def read_finished(self, folder: Path) -> dict[str, Any]:
        """Return the contents of ``run.json`` of a finished run.

        Raises:
          RunError: the folder holds no run of this kind, or an unfinished one.
        """
        run = self.read(folder, hint=f"expected a run of `{self.command}`")
        if run is None:
            if not folder.exists():
                raise RunError(
                    f"{folder}: no such folder; expected a run of `{self.command}`{near_path(folder)}"
                )
            raise RunError(f"{folder}: expected a run of `{self.command}`, found no {self.file}")
        if not (folder / self.finished).exists():
            command = " ".join(run.get("command", ()))
            raise RunError(f"{folder}: the run is not finished: repeat its command, {quote(command)}")
        self.check_files(folder, run)
        return run

    def finish(self, folder: Path, summary: Any) -> None:
        """Finish a run: write the digests of all files to its record, then its summary.

        Raises:
          RunError: a file cannot be written.
        """
        get("runs", "seal").value(self, folder, summary)

    def reopen(self, folder: Path) -> None:
        """Mark a finished run as unfinished, before its files change.

        Raises:
          RunError: the summary cannot be removed.
        """
        with writing(folder / self.finished):
            (folder / self.finished).unlink(missing_ok=True)

    def check_files(self, folder: Path, run: Mapping[str, Any], *, hint: str = "put the file back") -> None:
        """Compare the files in a folder with the digests in its record; loading a model verifies the model's files.

        Raises:
          RunError: a file is missing, or differs from its digest.
        """
        get("runs", "check sealed").value(self, folder, run, hint=hint)

    @contextlib.contextmanager
    def open(
        self,
        out: str | Path,
        inputs: Inputs,
        *,
        notes: Mapping[str, Any] | None = None,
        session: Mapping[str, Any] | None = None,
        compared: Callable[[Inputs, Inputs], tuple[Inputs, Inputs]] = lambda recorded, wanted: (
            recorded,
            wanted,
        ),
    ) -> Iterator[RunFolder]:
        """Create the folder of a run with its parents, or open it to continue, and lock it against a second writer.

        Args:
          out: Run folder.
          inputs: Everything that decides the result.
          notes: Other fields for ``run.json``; written once, not compared.
          session: How it is run this time; default: only the time.
          compared: Maps the recorded and the wanted inputs to the parts that must be equal.

        Raises:
          RunError: the folder is a file or cannot be written, another process is writing to it, or it holds another
            run (the message names each differing field with both values).
        """
        path = self.check(out)
        with contextlib.ExitStack() as stack:
            stack.enter_context(held_folder(path))
            recorded, wanted = self.read(path), as_recorded(inputs)
            if recorded is not None and (path / self.finished).exists():
                hint = f"put the file back; or remove {self.finished} and repeat the command, which continues the run"
                self.check_files(path, recorded, hint=hint)
            rows = None if self.rows is None else self.rows.read(path / self.rows.file, cut=True)
            if recorded is not None and recorded["inputs"] != wanted:
                if rows is not None and not rows:
                    recorded = None  # the run stopped before its first row: nothing to keep
                else:
                    same = get("runs", "check inputs").value
                    same(path, *compared(recorded["inputs"], wanted), file=self.file)
            record = self.record(path, recorded, inputs=wanted, session=session, notes=notes or {})
            file = None if self.rows is None else stack.enter_context(self.rows.open(path, rows))
            yield RunFolder(path, self, record, cast("RowFile[Any]", file))

    def check_together(self, out: str | Path) -> Path:
        """Like :meth:`check`, made only on process 0. A collective; raises errors in every process."""
        on_first_process(lambda: str(self.check(out)))
        return Path(out)

    @contextlib.contextmanager
    def open_together(
        self,
        out: str | Path,
        inputs: Inputs,
        *,
        notes: Mapping[str, Any] | None = None,
        session: Mapping[str, Any] | None = None,
    ) -> Iterator[RunFolder]:
        """Like :meth:`open`, in every process of a job; a collective.

        Only process 0 locks and writes the folder. The others know the finished rows, and keep new rows only in memory;
        only process 0 may finish the rows and the run. Errors are raised in every process.
        """
        opens = partial(self.open, out, inputs, notes=notes, session=session)
        with entered_on_first_process(opens, lambda folder: folder.record) as (folder, record):
            assert self.rows is not None
            file = share_rows(self.rows, Path(out), folder and folder.file)
            yield folder or RunFolder(Path(out), self, record, file)

    def record(
        self,
        folder: Path,
        recorded: Mapping[str, Any] | None,
        *,
        inputs: Mapping[str, Any],
        session: Mapping[str, Any] | None,
        notes: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Record a new session, of a new run if ``recorded`` is None, unless the run is finished; return the record."""
        new = {"kind": self.name, "format": 1, "inputs": inputs, "command": command_line(), **notes}
        known = recorded or {**new, "sessions": []}
        if not (folder / self.finished).exists():
            session = {"started": session_now()["started"]} if session is None else session
            known = {**known, "sessions": [*known.get("sessions", ()), session]}
            write_json(folder / self.file, known)
        return known


def session_now() -> dict[str, Any]:
    """Return the time, and the version of Python."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
    }


def devices_of(mesh: Any) -> dict[str, Any]:
    """Return kind and number of a mesh's devices, and the number of processes that share them, JSON-ready."""
    devices = mesh.devices.flatten().tolist()
    kind = {"platform": devices[0].platform, "kind": devices[0].device_kind}
    return {**kind, "count": len(devices), "processes": process_count()}


def as_recorded(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Pass the inputs of a run through JSON: they must compare equal to inputs that are read back."""
    return json.loads(json.dumps(shown(inputs), allow_nan=False))
