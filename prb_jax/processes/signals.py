"""Ctrl-C and SIGTERM on a thread of their own.

Python runs its handlers in the main thread, between two instructions, so never while that thread waits for other
processes inside of JAX. But the number of a signal is written into a socket at once, and a thread can read it there.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def take_signals(act: Callable[[signal.Signals], None]) -> Callable[[], None]:
    """Calls ``act`` on a thread for each Ctrl-C and SIGTERM, and nothing else happens any more.

    Returns:
      A function that puts back the handlers there were. Outside of the main thread nothing is changed at all.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = {number: signal.signal(number, _leave_to_the_thread) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)

    def listen(writing: socket.socket) -> None:  # it also keeps the writing end open
        while data := reading.recv(1):
            if data[0] in SIGNALS:
                act(signal.Signals(data[0]))

    def put_back() -> None:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        writing.shutdown(socket.SHUT_RDWR)  # the thread ends

    threading.Thread(target=listen, args=(writing,), name="signals", daemon=True).start()
    return put_back


def take_sigterm_again() -> Callable[[], None]:
    """Takes SIGTERM from a handler that a library has set since, of which Python does not know.

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
