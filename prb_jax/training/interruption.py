"""SIGTERM and Ctrl-C as a wish to stop after this step, agreed on by all processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from prb_jax.processes.job import stops_at_a_step
from prb_jax.processes.sharing import process_count

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Whether to stop. Of several processes, one that was told to stop tells the others."""

    def __init__(self) -> None:
        self.received: str | None = None

    def reached(self, step: int) -> str | None:
        """The name of the signal, if this step is the last one; every process says so at the same step."""
        if process_count() == 1:
            return self.received
        from jax.experimental import multihost_utils

        # JAX's own watcher took SIGTERM, which is how a cluster announces that machines will go away.
        return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None


@contextlib.contextmanager
def watch_signals() -> Iterator[Interruption]:
    """Turns the first SIGTERM or Ctrl-C (of several processes SIGTERM alone) into a wish to stop; a second one acts as
    it always does."""
    interruption = Interruption()
    if process_count() > 1:
        with stops_at_a_step():
            yield interruption
        return
    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def handle(number: int, frame: FrameType | None) -> None:
        interruption.received = signal.Signals(number).name
        restore()

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield interruption
    finally:
        restore()
