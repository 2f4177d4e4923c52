"""Kinds of runs beside evaluation and training: ``run.json``, one growing file of rows, ``summary.json`` at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError, quote
from prb_jax.runs.folder import RUN, SUMMARY, as_recorded, check_same_inputs, read_record, record_session


@dataclass(frozen=True)
class RunKind:
    """What tells the folders of one command from others.

    Attributes:
      name: as ``run.json`` has it.
      command: that writes them, for messages.
      rows: the file of rows, as :func:`prb_jax.runs.rows.open_rows` opens it.
    """

    name: str
    command: str
    rows: str

    def read(self, folder: Path) -> dict[str, Any] | None:
        """Return what ``run.json`` says; None where there is no run.

        Raises:
          RunError: the file cannot be read, or the folder holds another kind of run.
        """
        return read_record(folder, RUN, kind=self.name, command=self.command, others=(self.rows, SUMMARY))

    def read_finished(self, folder: Path) -> dict[str, Any]:
        """Return what ``run.json`` of a finished run says.

        Raises:
          RunError: there is none, or it is not finished.
        """
        run = self.read(folder)
        if run is None:
            raise RunError(f"{folder}: no run of `{self.command}`: it has no {RUN}")
        if not (folder / SUMMARY).exists():
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
            rows = folder / self.rows
            if rows.exists() and rows.stat().st_size:
                check_same_inputs(folder, found["inputs"], wanted)
            found = None  # it stopped before its first row: there is nothing to keep
        now = {"started": datetime.now(UTC).isoformat(timespec="seconds")}
        record_session(
            folder / RUN,
            found,
            kind=self.name,
            inputs=wanted,
            session=now if session is None else session,
            notes=notes,
        )
