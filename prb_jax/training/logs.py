"""Logs of a run: `metrics.jsonl`, TensorBoard and Weights & Biases."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.errors import RunError, quote
from prb_jax.records.files import bounded_lines
from prb_jax.records.options import flat_settings
from prb_jax.records.reading import parse_json
from prb_jax.records.writing import json_line, whole_file, writing
from prb_jax.runs.training import METRICS
from prb_jax.seams import get
from prb_jax.training.config import RunOptions

if TYPE_CHECKING:
    pass

TENSORBOARD = "tensorboard"
_HINT = "remove the line to continue the run"


class StepFile:
    """An append-only file of JSON lines, each with a `step`.

    Args:
      path: File; created if missing.
      step: Number of completed steps. Later rows, left by a session that was killed, are dropped, and so is a torn
        line.
      rows: Rows of the file, if they have been read already.

    Raises:
      RunError: A line is not a row, or the file cannot be written.
    """

    def __init__(self, path: Path, *, step: int, rows: Sequence[dict[str, Any]] | None = None) -> None:
        self.path = path
        self.rows = [row for row in (read_steps(path) if rows is None else rows) if row["step"] <= step]
        with writing(path), whole_file(path) as file:
            file.writelines(map(json_line, self.rows))

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Add rows; every number must be finite."""
        self.rows += map(dict, rows)
        with writing(self.path), self.path.open("ab") as file:
            file.write(b"".join(map(json_line, rows)))

    def sync(self) -> None:
        """Wait for the disk: a checkpoint must not outlive the rows of its steps."""
        with writing(self.path), self.path.open("rb") as file:
            os.fsync(file.fileno())


class MetricsLog(StepFile):
    """Writer of metric rows, each with its step, to `metrics.jsonl` and the other logs of the settings.

    Args:
      out: Run folder.
      step: Number of completed updates. Later rows are dropped, so the file contains every step once.
      settings: Settings of the run; section `log` selects the other logs.

    Raises:
      RunError: The file cannot be read or written, or lacks a completed step; or wandb is requested but not installed.
    """

    def __init__(self, out: Path, *, step: int, settings: RunOptions) -> None:
        path, options = out / METRICS, settings.log
        known = read_metrics(path)
        last = max((row["step"] for row in known if "loss" in row and row["step"] <= step), default=0)
        if last < step:
            raise _gap(path, last + 1, step)
        super().__init__(path, step=step, rows=known)
        self._wandb = None
        if options.wandb:
            option = f"log.wandb={options.wandb}"
            self._wandb = get("training", "wandb").value(
                options.wandb, out, flat_settings(settings), option=option
            )
        self._events = None
        if options.tensorboard:
            with writing(path):
                events = get("training", "tensorboard").value
                self._events = events(out / TENSORBOARD, first_step=step + 1)

    def write(self, *rows: Mapping[str, float]) -> None:
        for row in rows:
            step = int(row["step"])
            scalars = {name: float(value) for name, value in row.items() if name != "step"}
            super().write({"step": step, **scalars})
            # TensorBoard groups curves by the part before the slash.
            tagged = {
                name.replace("_", "/", 1) if name.startswith("validation_") else f"train/{name}": value
                for name, value in scalars.items()
            }
            if self._events is not None:
                with writing(self.path):
                    self._events.write(step, tagged)
            if self._wandb is not None:
                self._wandb.log(tagged, step=step)

    def close(self) -> None:
        """Close the files."""
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_steps(path: Path, *, what: str = "a step") -> list[dict[str, Any]]:
    """Return the rows of a file, without a torn last line; empty without a file.

    Raises:
      RunError: A line is not a row with a step.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    rows = []
    whole = io.BytesIO(data[: data.rfind(b"\n") + 1])
    for number, line in enumerate(bounded_lines(whole, path, error=RunError), start=1):
        where = f"{path}:{number}: not a row of {what}"
        row = parse_json(line, where=where, error=RunError, hint=_HINT)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise RunError(f"{where}; {_HINT}")
        rows.append(row)
    return rows


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`, without a torn last line; empty without a file.

    Raises:
      RunError: A line is not a row of numbers, or a step is missing or occurs twice.
    """
    file = Path(path)
    rows, last = read_steps(file, what="metrics"), 0
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            if type(value) not in (int, float):
                found = quote(str(value)) if isinstance(value, str) else json.dumps(value)
                raise RunError(f"{file}:{number}: field {name!r}: expected a number, found {found}; {_HINT}")
        if "loss" in row:
            if row["step"] <= last:
                raise RunError(f"{file}:{number}: a second row of step {row['step']}; {_HINT}")
            if row["step"] > last + 1:
                raise _gap(file, last + 1, row["step"] - 1)
            last = row["step"]
    return rows


def _gap(path: Path, first: int, last: int) -> RunError:
    return RunError(
        f"{path}: the rows of steps {first} to {last} are missing: restore the whole file; or, to compute them again, "
        f"remove the checkpoints of step {first} and later, and the lines of those steps"
    )
