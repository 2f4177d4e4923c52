"""The folder of one run, of any verb: killed at any moment, continued by the same command.

``run.json`` (``train.json`` of training) says what was run. Its ``inputs`` decide the result: a run is continued only
with equal inputs. Its ``sessions`` say how, one entry for each start. ``summary.json`` is written last: a folder that
has it is finished. Files are written to a temporary name and renamed, or grow by whole rows; other files in the folder
are left alone. A finished run has the digests of its files in ``run.json`` (``format`` 2), with which they are compared
when they are read; folders of earlier versions (``format`` 1) have none.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict, cast

from prb_jax.errors import RunError, quote
from prb_jax.models.checkpoints.locate import MODEL, TRAIN
from prb_jax.platform.paths import shown
from prb_jax.platform.processes.agreement import differences
from prb_jax.platform.processes.sharing import entered_on_first_process, on_first_process, process_count
from prb_jax.records.digests import check_digests, digest_of_bytes, digests_of, matching
from prb_jax.records.reading import read_json, read_object
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import held_folder, json_file, refuse_file, write_file, write_json, writing
from prb_jax.runs import command_line
from prb_jax.runs.rows import RowFile, RowKind, share_rows

RUN = "run.json"
SUMMARY = "summary.json"
_LONGEST_DIFFERENCE = 20
_FORMAT: Final = 2  # of the record of a finished run

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class RunResult:
    """What a verb leaves.

    Attributes:
      out: the run folder.
      summary: what `summary.json` holds.
    """

    out: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """An open run folder, held against a second writer."""

    path: Path  # of the folder
    kind: RunKind  # of the run
    record: Mapping[str, Any] = field(repr=False)  # what `run.json` says
    file: RowFile[Any] = field(repr=False)  # its file of rows; only where the kind has one

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which makes the run a finished one."""
        self.kind.finish(self.path, summary)


class Session(TypedDict, total=False):
    """One start of a run; the time is missing where parts were merged."""

    started: str
    relax: list[str]
    settings: dict[str, Any]
    merged: list[dict[str, Any]]


class RunRecord(TypedDict):
    """What ``run.json`` holds."""

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
    """What tells the folders of one command from others."""

    name: str  # as ``run.json`` has it
    command: str  # that writes them, for messages
    # the file of rows: while it is empty, a run of other inputs takes the place of this one. None where a run
    # is never replaced.
    rows: RowKind[Any] | None = None
    file: str = RUN  # that says what was run
    # files and folders that, without that file, show that a folder holds something else
    others: tuple[str, ...] = ()
    finished: str = SUMMARY  # the file that a finished run has
    inputs: Any = dict[str, Any]  # TypedDict: the inputs that other code reads, and their types
    # patterns of the files, beside those above, whose digests the record of a finished run has
    sealed: tuple[str, ...] = ()

    def check(self, out: str | Path) -> Path:
        """Return the path of a folder that a run of this kind may be written to, before anything costly is done.

        Raises:
          RunError: it is a file, or holds something else than such a run.
        """
        refuse_file(out)
        self.read(Path(out))
        return Path(out)

    def read(self, folder: Path) -> dict[str, Any] | None:
        """Return what ``run.json`` says; None if the folder holds no run.

        Raises:
          RunError: the file cannot be read, or the folder holds another kind of run.
        """
        path, hint = folder / self.file, "give --out another folder"
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
            raise RunError(f"{path}: not of `{self.command}`; {hint}")
        check_schema(run, RunRecord, where=str(path), error=RunError, hint=hint)
        check_schema(run["inputs"], self.inputs, where=f"{path}: inputs", error=RunError, hint=hint)
        if run.get("format", 1) > _FORMAT:
            raise RunError(f"{path}: format {run['format']}: a later version of prb_jax wrote it; {hint}")
        return run

    def read_finished(self, folder: Path) -> dict[str, Any]:
        """Return what ``run.json`` of a finished run says.

        Raises:
          RunError: the folder holds no run of this kind, or it is not finished.
        """
        run = self.read(folder)
        if run is None:
            raise RunError(f"{folder}: no run of `{self.command}`: it has no {self.file}")
        if not (folder / self.finished).exists():
            command = " ".join(run.get("command", ()))
            raise RunError(f"{folder}: the run is not finished: repeat its command, {quote(command)}")
        self.check_files(folder, run)
        return run

    def finish(self, folder: Path, summary: Any) -> None:
        """Write the summary of a run, which makes it a finished one; before it the digests of all files in its record.

        Raises:
          RunError: a file cannot be written.
        """
        data = json_file(summary)
        patterns = [*self.sealed, *([self.rows.file] if self.rows else [])]
        files = {**digests_of(folder, patterns), self.finished: digest_of_bytes(data)}
        write_json(folder / self.file, {**(self.read(folder) or {}), "format": _FORMAT, "files": files})
        write_file(folder / self.finished, data)

    def reopen(self, folder: Path) -> None:
        """Make a finished run an unfinished one, before files of it change.

        Raises:
          RunError: it cannot be written.
        """
        with writing(folder / self.finished):
            (folder / self.finished).unlink(missing_ok=True)

    def check_files(self, folder: Path, run: Mapping[str, Any], *, hint: str = "put the file back") -> None:
        """Compare the files in a folder with the digests in its record; those of a model are left to loading it.

        Raises:
          RunError: a file is missing, or is not the one that was written.
        """
        path, files = folder / self.file, run.get("files", {})
        if run.get("format", 1) == _FORMAT:
            written = [
                self.finished,
                *([self.rows.file] if self.rows else []),
                *matching(folder, self.sealed),
            ]
            # What a killed command adds to a finished run lies in sub-folders.
            if unknown := [name for name in written if name not in files and "/" not in name]:
                raise RunError(f"{path}: field 'files': expected the digest of {unknown[0]}, found nothing")
        own = {name: digest for name, digest in files.items() if not name.startswith(f"{MODEL}/")}
        check_digests(folder, own, record=path, error=RunError, hint=hint)

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
        """Make the folder of a run, with its parents, or open it to continue, and hold it against a second writer.

        Args:
          out: the folder.
          inputs: everything that decides the result.
          notes: what else should stand in ``run.json`` beside the command; written once, not compared.
          session: how it is run this time; the time alone if not given.
          compared: gives what is compared of the inputs that were found and those that are wanted.

        Raises:
          RunError: the folder is a file or cannot be written, another process is writing to it, or it holds another
            run (each differing field is named, with both values).
        """
        path = self.check(out)
        with contextlib.ExitStack() as stack:
            stack.enter_context(held_folder(path))
            recorded, wanted = self.read(path), as_recorded(inputs)
            if recorded is not None and (path / self.finished).exists():
                hint = f"put the file back; or remove {self.finished}, and the same command goes on with what is there"
                self.check_files(path, recorded, hint=hint)
            rows = None if self.rows is None else self.rows.read(path / self.rows.file, cut=True)
            if recorded is not None and recorded["inputs"] != wanted:
                if rows is not None and not rows:
                    recorded = None  # it stopped before its first row: there is nothing to keep
                else:
                    check_same_inputs(path, *compared(recorded["inputs"], wanted), file=self.file)
            record = self.record(path, recorded, inputs=wanted, session=session, notes=notes or {})
            file = None if self.rows is None else stack.enter_context(self.rows.open(path, rows))
            yield RunFolder(path, self, record, cast("RowFile[Any]", file))

    def check_together(self, out: str | Path) -> Path:
        """Return the path as :meth:`check` does, which process 0 alone makes. A collective; errors in every process."""
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
        """Open the folder in every process of a job, as :meth:`open` does in one; a collective.

        Process 0 alone holds and writes it. The others know what is finished, and keep the rows that they append in
        memory alone; only process 0 may finish the rows and the run. Errors are raised in every process.
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
        """Write that the run that was found (a new one where it is None) is started again, unless it is finished."""
        new = {"kind": self.name, "format": 1, "inputs": inputs, "command": command_line(), **notes}
        known = recorded or {**new, "sessions": []}
        if not (folder / self.finished).exists():
            session = {"started": session_now()["started"]} if session is None else session
            known = {**known, "sessions": [*known.get("sessions", ()), session]}
            write_json(folder / self.file, known)
        return known


def check_file(path: Path) -> None:
    """Compare a file of a run of any kind with its digest in the record beside it, where there is one.

    Raises:
      RunError: it is not the file that was written.
    """
    for name in (RUN, TRAIN):
        record = path.parent / name
        if record.is_file():
            run = read_object(record, error=RunError)
            check_schema(run, RunRecord, where=str(record), error=RunError)
            known = {path.name: run["files"][path.name]} if path.name in run.get("files", {}) else {}
            check_digests(path.parent, known, record=record, error=RunError)


def session_now() -> dict[str, Any]:
    """Return when a run is started, and in which Python."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
    }


def devices_of(mesh: Any) -> dict[str, Any]:
    """Return what the devices of a mesh are, and how many processes share them, JSON-ready."""
    devices = mesh.devices.flatten().tolist()
    kind = {"platform": devices[0].platform, "kind": devices[0].device_kind}
    return {**kind, "count": len(devices), "processes": process_count()}


def as_recorded(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a run through JSON once, so that what is compared is what will be read back."""
    return json.loads(json.dumps(shown(inputs), allow_nan=False))


def check_same_inputs(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, file: str = RUN) -> None:
    """Refuses to continue a run with other inputs.

    Args:
      path: the run folder.
      old: what its `file` says.
      new: what is asked for now.
      file: its name, for the message.

    Raises:
      RunError: naming each field that differs, with both values.
    """
    changed = differences(old, new)
    if not changed:
        return
    lines = [f"  {name}: {before} -> {after}" for name, (before, after) in changed.items()]
    if len(lines) > _LONGEST_DIFFERENCE:
        lines[_LONGEST_DIFFERENCE:] = [f"  and {len(lines) - _LONGEST_DIFFERENCE} more"]
    raise RunError(
        f"{path} holds another run; these differ from its {file}:\n"
        + "\n".join(lines)
        + "\nTo continue that run, repeat its settings; for a new one, give --out another folder."
    )
