"""What a run writes along the way: `metrics.jsonl`, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prb_jax.data.reading import parse_json
from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError
from prb_jax.runs.weights_and_biases import start_wandb
from prb_jax.training.event_file import EventFile
from prb_jax.training.settings import LogSettings

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """Rows of numbers, each with its step, to a file and to whatever else was asked for.

    Args:
      out: the run folder.
      step: updates made so far: rows beyond it, of a start that was killed later, are dropped, so that the
        file holds every step once.
      options: what else is written.
      settings: of the run, for Weights & Biases.

    Raises:
      RunError: the file cannot be read or written, or lacks a step that was made; wandb is asked for and not installed.
    """

    def __init__(
        self, out: Path, *, step: int, options: LogSettings, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.path = out / METRICS
        self.rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        last = max((row["step"] for row in self.rows if "loss" in row), default=0)
        if last < step:
            raise _gap(self.path, last + 1, step)
        with writing(self.path), whole_file(self.path) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in self.rows)
        self._wandb = None
        if options.wandb:
            option = f"log.wandb={options.wandb}"
            self._wandb = start_wandb(options.wandb, out, settings or {}, option=option)
        with writing(self.path):
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
            self._events = EventFile(out / TENSORBOARD, first_step=step + 1) if options.tensorboard else None

    def write(self, row: Mapping[str, float]) -> None:
        """Adds one row; it must have a `step`, and every number must be finite."""
        step = int(row["step"])
        scalars = {name: float(value) for name, value in row.items() if name != "step"}
        self.rows.append({"step": step, **scalars})
        with writing(self.path):
            self._file.write(json.dumps(self.rows[-1], allow_nan=False) + "\n")
            self._file.flush()
            if self._events is not None:
                self._events.write(step, {_tag(name): value for name, value in scalars.items()})
        if self._wandb is not None:
            self._wandb.log({_tag(name): value for name, value in scalars.items()}, step=step)

    def sync(self) -> None:
        """Waits for the disk: a checkpoint must not outlive the rows of its steps."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, without a torn last line; none where there is no file.

    Raises:
      RunError: a line that is no row of numbers; steps that are missing, or stand twice.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror or error}") from error
    rows, last = [], 0
    hint = "remove the line to continue the run"
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        where = f"{file}:{number}"
        row = parse_json(line, where=f"{where}: not a row of metrics", error=RunError, hint=hint)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise RunError(f"{where}: not a row of metrics; {hint}")
        if "loss" in row:
            if row["step"] <= last:
                raise RunError(f"{where}: a second row of step {row['step']}; {hint}")
            if row["step"] > last + 1:
                raise _gap(file, last + 1, row["step"] - 1)
            last = row["step"]
        rows.append(row)
    return rows


def _gap(path: Path, first: int, last: int) -> RunError:
    return RunError(
        f"{path}: the rows of steps {first} to {last} are missing: put back the whole file; or, to compute them again, "
        f"remove the checkpoints of step {first} and later, and the lines of those steps"
    )


def _tag(name: str) -> str:
    """TensorBoard groups by what stands before the slash."""
    first, _, rest = name.partition("_")
    return f"validation/{rest}" if first == "validation" else f"train/{name}"
