"""A job of several processes: joined at the start, and ended together.

A process that dies leaves the others waiting for it in a collective. So every process holds a connection to
process 0, and the operating system closes it however its process ends: one that is gone is noticed at once,
and one whose machine is gone after half a minute. A process that fails says so before it goes. Each of the
others then ends with one message, at whatever place it waits: a run can be killed at any moment. JAX's own
heartbeat stays behind this, with its 100 seconds.

One process alone needs none of it, and pays nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from prb_jax.errors import MeshError, quote
from prb_jax.processes.watch import Hub, Spoke, Watch

INTERRUPTED = 75
"""Status of a run that was told to stop before it was done (EX_TEMPFAIL): the same command continues it."""

_watch: Watch | None = None


def start_job() -> None:
    """``jax.distributed.initialize``, and from then on the processes end together.

    To be called before the first use of a device. On a TPU pod, Slurm or GKE all is found out; elsewhere
    ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` name the processes.

    Raises:
      MeshError: which processes there are is not known.
    """
    import jax

    count, index = (_number(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    try:
        jax.distributed.initialize(num_processes=count, process_id=index)
    except ValueError as error:
        raise MeshError(
            f"the processes of this job are not known ({str(error).rstrip('.')}): on a TPU pod, Slurm or GKE they "
            "are found out; elsewhere set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
    _start_watch()


def leave_job(status: int, message: str) -> None:
    """Ends this process and tells the others, who end with the same status; returns where there is no job.

    Args:
      status: not 0. A process that came to its end just ends.
      message: why, one line; printed here, and by the others with this process's name.
    """
    if _watch is not None:
        _watch.leave(status, message)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise MeshError(f"{name}: expected a whole number, found {quote(text)}") from None


def _start_watch() -> None:
    global _watch
    # JAX has no public name for its key-value store; Orbax and others use this one.
    from jax._src import distributed

    state: Any = distributed.global_state
    if state.num_processes == 1 or _watch is not None:
        return
    try:
        watch = Hub(state) if state.process_id == 0 else Spoke(state)
    except Exception as error:  # the run itself needs none of this
        print(
            f"prb: process {state.process_id} of {state.num_processes} cannot watch the others "
            f"({type(error).__name__}: {error}): one that dies is noticed after 100 seconds only",
            file=sys.stderr,
            flush=True,
        )
        return
    _watch = watch
    threading.Thread(target=watch.listen, name="job", daemon=True).start()
    sys.excepthook = watch.uncaught
    atexit.register(watch.done)  # before JAX's own, which waits for all processes
