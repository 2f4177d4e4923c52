"""A job of several processes: joined at the start, and ended together.

A process that dies leaves the others waiting for it in a collective. So every process holds a connection to
process 0, and the operating system closes it however its process ends: one that is gone is noticed at once,
and one whose machine is gone after half a minute. A process that fails says so before it goes. Each of the
others then ends with one message, at whatever place it waits: a run can be killed at any moment. JAX's own
heartbeat stays behind this, with its 100 seconds.

Ctrl-C and SIGTERM are taken on a thread of their own: Python runs its handlers in the main thread, between two
instructions, so never while that thread waits for other processes inside of JAX. But the number of a signal is
written into a socket at once, and a thread can read it there.

One process alone needs none of it, and pays nothing.
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
"""Status of a run that was told to stop before it was done (EX_TEMPFAIL): the same command continues it."""

INTERRUPTED_BY_USER: Final = 130
"""Status of a run that Ctrl-C stopped."""

_SECONDS_TO_MEET = 300

_watch: ProcessWatch | None = None
_ask_to_stop: Callable[[], None] | None = None
_stops_at_a_step = False


def start_job(*, after_interrupt: str = "the same command continues the run") -> None:
    """``jax.distributed.initialize``, and from then on the processes end together.

    To be called before the first use of a device. On a TPU pod, Slurm or GKE all is found out; elsewhere
    ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` name the processes. Of several
    processes, one that gets Ctrl-C or SIGTERM ends at once, with status 130 or 75, also while it waits for the others.

    Args:
      after_interrupt: what the line about such a signal says of the run.

    Raises:
      MeshError: which processes there are is not known, or the port of process 0 is taken.
    """
    global _ask_to_stop, _watch
    import jax

    # JAX has no public name for its key-value store and its signal handler; Orbax and others use this one.
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
            f"the processes of this job are not known ({str(error).rstrip('.')}): on a TPU pod, Slurm or GKE they "
            "are found out; elsewhere set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
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
    except Exception as error:  # the run itself needs none of this
        print(
            f"prb: process {state.process_id} of {state.num_processes} cannot watch the others "
            f"({type(error).__name__}: {error}): one that dies is noticed after 100 seconds only",
            file=sys.stderr,
            flush=True,
        )
        return
    sys.excepthook = _watch.uncaught
    atexit.register(_watch.done)  # before JAX's own, which waits for all processes


@contextlib.contextmanager
def stops_at_a_step() -> Iterator[None]:
    """Inside of it the first SIGTERM is left to JAX, whose processes agree on a step; a second one ends at once."""
    global _stops_at_a_step
    _stops_at_a_step = True
    try:
        yield
    finally:
        _stops_at_a_step = False


def leave_job(status: int, message: str) -> None:
    """End this process and tell the others, who end with the same status; return where there is no job.

    Args:
      status: not 0. A process that came to its end just ends.
      message: why, one line; printed here, and by the others with this process's name.
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
    """Refuse an address of process 0 that is not valid or in use: JAX itself often ends with a segmentation fault."""
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
    """Call ``act`` on a thread for each Ctrl-C and SIGTERM, and nothing else happens any more.

    Returns:
      A function that puts back the handlers there were. Outside of the main thread nothing is changed at all.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    taken = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _leave_to_the_thread) for number in taken}
    descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)

    def listen(writing: socket.socket) -> None:  # it also keeps the writing end open
        while data := reading.recv(1):
            if data[0] in taken:
                act(signal.Signals(data[0]))

    def put_back() -> None:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        writing.shutdown(socket.SHUT_RDWR)  # the thread ends

    threading.Thread(target=listen, args=(writing,), name="signals", daemon=True).start()
    return put_back


def _take_sigterm_again() -> Callable[[], None]:
    """Take SIGTERM from a handler that a library has set since, of which Python does not know.

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
