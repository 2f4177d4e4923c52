"""Logs of a run: `metrics.jsonl`, TensorBoard, Weights & Biases, and the plot of its learning curves."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.errors import RunError, quote
from prb_jax.platform.extras import need_extra
from prb_jax.records.options import flat_settings
from prb_jax.records.reading import bounded_lines, parse_json
from prb_jax.records.writing import json_line, whole_file, writing
from prb_jax.runs.training import METRICS
from prb_jax.seams import get
from prb_jax.training.config import RunOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TENSORBOARD = "tensorboard"
CURVES = "learning_curves.png"
_HINT = "remove the line to continue the run"

_PANELS = {"loss": "Loss", "accuracy": "Accuracy", "margin": "Mean margin"}
_REWARDED = {
    "reward": "Reward", "gold": "Gold", "kl": "KL to the reference", "entropy": "Entropy", "length": "Tokens"
}  # fmt: skip
"""Metrics to plot and their titles, for runs that learn from labels and for runs that learn from a reward."""


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
        with writing(path):
            self._events = EventFile(out / TENSORBOARD, first_step=step + 1) if options.tensorboard else None

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


class EventFile:
    """A TensorBoard event file with scalars; does not need TensorBoard. Every `write` is flushed: a viewer sees it at
    once, and a kill loses nothing.

    The file is a sequence of TFRecords: length, masked CRC-32C of the length, data, masked CRC-32C of the data. The
    data is an `Event` in protocol buffer encoding.

    Args:
      folder: Folder of the files, created if necessary; each session of a run adds a file.
      first_step: Step from which TensorBoard hides the points of earlier sessions.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 0) -> None:
        path, now = Path(folder), time.time()
        path.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = open(path / name, "ab")  # noqa: SIM115
        self._file.write(record(event(now, version=b"brain.Event:2")))
        self._file.write(record(event(now, step=first_step, start=True)))
        self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one point to each of the named curves."""
        self._file.write(record(event(time.time(), step=step, scalars=scalars)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def record(data: bytes) -> bytes:
    """Return one TFRecord."""

    def masked(data: bytes) -> bytes:
        crc = crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def event(
    wall_time: float,
    *,
    step: int = 0,
    scalars: Mapping[str, float] | None = None,
    version: bytes | None = None,
    start: bool = False,
) -> bytes:
    """Return a serialised `tensorflow.Event` with scalars, the file's version, or the start of a session."""
    data = b"\x09" + struct.pack("<d", wall_time)  # field 1, double
    if step:
        data += b"\x10" + _varint(step)  # field 2, int64
    if version is not None:
        data += _field(3, version)
    if scalars is not None:
        values = (
            _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        data += _field(5, b"".join(values))  # Summary
    return data + (_field(7, b"\x08\x01") if start else b"")  # SessionLog with status START


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


@functools.cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


def crc32c(data: bytes) -> int:
    """Return the CRC-32 with the Castagnoli polynomial."""
    crc, table = 0xFFFFFFFF, _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def panels_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the metrics to plot from these rows: names and panel titles."""
    panels = _REWARDED if any("reward" in row for row in rows) else _PANELS
    return {name: title for name, title in panels.items() if any(name in row for row in rows)} or _PANELS


def plot_curves(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Save :func:`curves_figure` of these rows, with a title, as a PNG file.

    Raises:
      RunError: Matplotlib is not installed, or the file cannot be written.
    """
    figure = curves_figure(rows)
    figure.suptitle(title)
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png")


def curves_figure(
    rows: Sequence[Mapping[str, Any]], *, size: tuple[float, float] = (12, 3.6), panel: str | None = None
) -> Figure:
    """Plot training metrics (with running means) and validation metrics against the step.

    Args:
      rows: Lines of `metrics.jsonl`.
      size: Width and height in inches.
      panel: The only metric to plot; by default all of `panels_of`.

    Raises:
      RunError: Matplotlib is not installed.
    """
    need_extra("report", "learning curves (none: log.plot=false)")
    from matplotlib.figure import Figure

    def series(name: str) -> tuple[list[int], list[float]]:
        return [row["step"] for row in rows if name in row], [row[name] for row in rows if name in row]

    figure, panels = Figure(figsize=size, layout="constrained"), panels_of(rows)
    explained = next(iter(panels))
    panels = panels if panel is None else {panel: panels[panel]}
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        steps, values = series(name)
        if steps:
            axis.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
            axis.plot(steps, _running_mean(values), color="tab:blue", label="training")
        steps, values = series(f"validation_{name}")
        if steps:
            axis.plot(steps, values, color="tab:orange", marker="o", markersize=3, label="validation")
        if (chance := {"loss": math.log(2), "accuracy": 0.5}.get(name)) is not None:
            axis.axhline(chance, color="gray", linewidth=0.8, linestyle=":", label="chance")
        axis.set_xlabel("step")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if name == explained:
            axis.legend()
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return centred running means: up to a fortieth of the run on either side, fewer near the ends.

    A straight line is unchanged, whereas a mean over earlier points would lag behind.
    """
    sums, last, half = [0.0, *itertools.accumulate(values)], len(values) - 1, len(values) // 40
    reach = [min(half, i, last - i) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]
