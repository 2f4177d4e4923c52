"""Multi-process jobs: processes start together and end together.

If a process dies, the others wait for it in a collective. Every process therefore holds a connection to
process 0, which the operating system closes however the process ends. The others notice a dead process at
once, and a lost machine after 30 seconds. A process that fails sends a message first. Each of the others then
ends with one message, wherever it waits; a run can be killed at any moment. JAX's own heartbeat remains as
the fallback, after 100 seconds.

A separate thread handles Ctrl-C and SIGTERM. Python runs signal handlers in the main thread between two
instructions, so never while that thread waits inside JAX. But Python writes the signal's number to a socket at
once, and a thread can read it there.

Single-process runs skip all of this.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from prb_jax.errors import MeshError, quote
from prb_jax.platform.processes.watch import FAILED, ProcessWatch, end_alone, listening_socket

INTERRUPTED: Final = 75
"""Exit status of a run that was stopped before its end (EX_TEMPFAIL): the same command continues it."""

INTERRUPTED_BY_USER: Final = 130
"""Exit status of a run that Ctrl-C stopped."""

_SECONDS_TO_MEET = 300

_watch: ProcessWatch | None = None
_ask_to_stop: Callable[[], None] | None = None
_stops_at_a_step = False


def start_job(*, after_interrupt: str = "the same command continues the run") -> None:
    """Call ``jax.distributed.initialize``; from then on the processes end together.

    Call this before the first use of a device. JAX detects a TPU pod, Slurm and GKE; elsewhere
    ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` define the processes. With several
    processes, Ctrl-C or SIGTERM ends a process at once with status 130 or 75, even while it waits for the others.

    Args:
      after_interrupt: Advice about the run, printed after such a signal.

    Raises:
      MeshError: the processes of the job are unknown, or the port of process 0 is in use.
    """
    global _ask_to_stop, _watch
    import jax

    # JAX has no public name for its key-value store and its signal handler; Orbax also uses this private one.
    from jax._src import distributed

    count, index = (_number(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    _check_address(first=index == 0)
    state: Any = distributed.global_state
    put_back = _take_signals(lambda number: _end_by(number, after_interrupt))

    def not_met() -> None:
        end_alone(
            FAILED,
            f"error: process {state.process_id} waited {_SECONDS_TO_MEET} seconds for the other processes to meet at "
            f"{state.coordinator_address}: is each of them started, with the same address and number of processes?",
        )

    meeting = threading.Timer(_SECONDS_TO_MEET, not_met)
    meeting.daemon = True
    meeting.start()
    try:
        jax.distributed.initialize(
            num_processes=count, process_id=index, initialization_timeout=2 * _SECONDS_TO_MEET
        )
    except ValueError as error:
        put_back()
        raise MeshError(
            f"the processes of this job are unknown ({str(error).rstrip('.')}): JAX detects TPU pods, Slurm, GKE; "
            "elsewhere set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
    finally:
        meeting.cancel()
    if state.num_processes == 1:
        put_back()
        return
    if state.preemption_sync_manager is not None:
        _ask_to_stop = _take_sigterm_again()
    if _watch is not None:
        return
    try:
        _watch = ProcessWatch(state)
    except Exception as error:  # the run itself works without the watch
        print(
            f"prb: process {state.process_id} of {state.num_processes} cannot watch the others "
            f"({type(error).__name__}: {error}): a dead process is noticed only after 100 seconds",
            file=sys.stderr,
            flush=True,
        )
        return
    sys.excepthook = _watch.uncaught
    atexit.register(_watch.done)  # runs before JAX's own handler, which waits for all processes


@contextlib.contextmanager
def stops_at_a_step() -> Iterator[None]:
    """Leave the first SIGTERM to JAX, whose processes agree on a step to stop at; a second one ends at once."""
    global _stops_at_a_step
    _stops_at_a_step = True
    try:
        yield
    finally:
        _stops_at_a_step = False


def leave_job(status: int, message: str) -> None:
    """End this process and tell the others, which end with the same status; return if there is no job.

    Args:
      status: Exit status, not 0: a process that succeeds just ends.
      message: Reason, one line; printed here, and by the others with this process's name.
    """
    if _watch is not None:
        _watch.leave(status, message)


def _end_by(number: signal.Signals, after_interrupt: str) -> None:
    global _stops_at_a_step
    if number == signal.SIGTERM and _stops_at_a_step and _ask_to_stop is not None:
        _stops_at_a_step = False
        _ask_to_stop()
        return
    if number == signal.SIGINT:
        status, message = INTERRUPTED_BY_USER, f"interrupted; {after_interrupt}"
    else:
        status, message = INTERRUPTED, f"{number.name}; {after_interrupt}"
    leave_job(status, message)
    end_alone(status, message)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return int(text) if text else None
    except ValueError:
        raise MeshError(f"{name}: expected a whole number, found {quote(text)}") from None


def _check_address(*, first: bool) -> None:
    """Reject an invalid or used address of process 0, at which JAX itself often ends with a segmentation fault."""
    name, address = "JAX_COORDINATOR_ADDRESS", os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return
    port = address.rpartition(":")[2]
    if ":" not in address or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise MeshError(f"{name}: expected HOST:PORT, found {quote(address)}")
    if not first or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return
    try:
        listening_socket(int(port)).close()
    except OSError as error:
        raise MeshError(
            f"process 0 cannot listen at {address} ({os.strerror(error.errno or 0)}): give all processes another port "
            f"({name})"
        ) from error


def _take_signals(act: Callable[[signal.Signals], None]) -> Callable[[], None]:
    """Call ``act`` on a thread for each Ctrl-C and SIGTERM, in place of all other handling.

    Returns:
      A function that restores the previous handlers. Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    taken = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _leave_to_the_thread) for number in taken}
    descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)

    def listen(writing: socket.socket) -> None:  # the argument also keeps the writing end open
        while data := reading.recv(1):
            if data[0] in taken:
                act(signal.Signals(data[0]))

    def put_back() -> None:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        writing.shutdown(socket.SHUT_RDWR)  # ends the thread

    threading.Thread(target=listen, args=(writing,), name="signals", daemon=True).start()
    return put_back


def _take_sigterm_again() -> Callable[[], None]:
    """Take SIGTERM back from a handler that a C library installed, which Python cannot see.

    Returns:
      A function that calls that handler.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    address = set_handler(signal.SIGTERM, None)
    signal.signal(signal.SIGTERM, _leave_to_the_thread)
    return lambda: ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(signal.SIGTERM)


def _leave_to_the_thread(*_: object) -> None:
    pass
