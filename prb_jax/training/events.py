"""TensorBoard's event files, written by tensorboardX."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


class EventFile:
    """A TensorBoard event file with scalars.

    Every `write` is flushed, without the queue of tensorboardX's `SummaryWriter`: a viewer sees it at once, and a kill
    loses nothing.

    Args:
      folder: Folder of the files, created if necessary; each session of a run adds a file.
      first_step: Step from which TensorBoard hides the points of earlier sessions.
    """

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The name has the time in seconds: two sessions of one second need two files.
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns()}")
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one point to each of the named curves."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(step=step, summary=Summary(value=values))

    def _add(self, **contents: Any) -> None:
        self._file.write_event(Event(wall_time=time.time(), **contents))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
