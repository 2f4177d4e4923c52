"""What was run in a folder, for every verb: ``run.json`` (``train.json`` of training) with the inputs that decide the
result, compared when the run is continued, and an entry for each start; and ``summary.json`` at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_json
from prb_jax.data.writing import write_json
from prb_jax.errors import RunError, quote
from prb_jax.processes.agreement import differences
from prb_jax.storage.urls import shown

RUN = "run.json"
SUMMARY = "summary.json"
_LONGEST_DIFFERENCE = 20


@dataclass(frozen=True)
class RunKind:
    """What tells the folders of one command from others.

    Attributes:
      name: as ``run.json`` has it.
      command: that writes them, for messages.
      rows: the file of rows, as :func:`prb_jax.runs.rows.open_rows` opens it: while it is empty, a run of other inputs
        takes the place of this one. None where a run is never replaced.
      file: that says what was run.
      others: files and folders that, without that file, show that a folder holds something else.
      finished: the file that a finished run has.
    """

    name: str
    command: str
    rows: str | None = None
    file: str = RUN
    others: tuple[str, ...] = ()
    finished: str = SUMMARY

    def read(self, folder: Path) -> dict[str, Any] | None:
        """Return what ``run.json`` says; None where there is no run.

        Raises:
          RunError: the file cannot be read, or the folder holds another kind of run.
        """
        path, hint = folder / self.file, "give --out another folder"
        run = read_json(path, error=RunError, hint=hint, optional=True)
        if run is None and not path.exists():
            for other in (*self.others, self.rows, self.finished):
                if other is not None and (folder / other).exists():
                    raise RunError(
                        f"{folder} holds another run: it has {other} but no {self.file}, which `{self.command}` "
                        f"writes; {hint}"
                    )
            return None
        if (
            not isinstance(run, dict)
            or run.get("kind") != self.name
            or not isinstance(run.get("inputs"), dict)
        ):
            raise RunError(f"{path}: not of `{self.command}`; {hint}")
        return run

    def read_finished(self, folder: Path) -> dict[str, Any]:
        """Return what ``run.json`` of a finished run says.

        Raises:
          RunError: there is none, or it is not finished.
        """
        run = self.read(folder)
        if run is None:
            raise RunError(f"{folder}: no run of `{self.command}`: it has no {self.file}")
        if not (folder / self.finished).exists():
            raise RunError(
                f"{folder}: the run is not finished: repeat its command, {quote(' '.join(run['command']))}"
            )
        return run

    def start(
        self,
        folder: Path,
        inputs: Mapping[str, Any],
        *,
        notes: Mapping[str, Any],
        session: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``run.json``: of a new run, or that the run of this folder goes on.

        Args:
          folder: held by this process.
          inputs: everything that decides the result.
          notes: what else should stand in ``run.json``, ``command`` among it; written once, not compared.
          session: how it is run this time; the time alone if not given.

        Raises:
          RunError: the folder holds rows of other inputs (each differing field is named), or cannot be written.
        """
        wanted, found = as_recorded(inputs), self.read(folder)
        if found is not None and found["inputs"] != wanted:
            rows = None if self.rows is None else folder / self.rows
            if rows is None or (rows.exists() and rows.stat().st_size):
                check_same_inputs(folder, found["inputs"], wanted, file=self.file)
            found = None  # it stopped before its first row: there is nothing to keep
        now = {"started": datetime.now(UTC).isoformat(timespec="seconds")}
        self.record(folder, found, inputs=wanted, session=now if session is None else session, notes=notes)

    def record(
        self,
        folder: Path,
        found: Mapping[str, Any] | None,
        *,
        inputs: Mapping[str, Any],
        session: Mapping[str, Any],
        notes: Mapping[str, Any],
    ) -> None:
        """Write that the run that was found (a new one where it is None) is started again, unless it is finished."""
        if (folder / self.finished).exists():
            return
        known = found or {"kind": self.name, "format": 1, "inputs": inputs, **notes, "sessions": []}
        write_json(folder / self.file, {**known, "sessions": [*known["sessions"], session]})


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
