"""Connections between the processes of one job: when one ends, the others notice and end too.

Every process holds a connection to process 0, and the operating system closes it however its process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, NoReturn

from prb_jax.errors import first_line

FAILED: Final = 1
"""Exit status of a process that failed with a traceback, or whose job lost a process."""

_KEY: Final = "prb_jax/job"
_SECONDS_TO_CONNECT: Final = 60
# An error may be the first sign of a lost process; that process's own message arrives within this time.
_SECONDS_FOR_NEWS: Final = 3.0
# Idle seconds, seconds between probes, number of probes: a lost machine is noticed after 30 seconds.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_CONTINUES: Final = "the same command continues the run, also with another number of processes"


class ProcessWatch:
    """Connections of this process: process 0 is connected to all others, every other process to process 0.

    A message is a line of JSON: {process, status}, plus {message, where} after a failure. Process 0 forwards each
    message to all others.

    Args:
      state: Global state of ``jax.distributed``.
    """

    def __init__(self, state: Any) -> None:
        self.process, self.count = int(state.process_id), int(state.num_processes)
        self._excepthook = sys.excepthook
        self._ending, self._sending = threading.Lock(), threading.Lock()
        self._peers: list[socket.socket] = []
        if self.process == 0:
            server, token = listening_socket(0, backlog=self.count), secrets.token_hex(16)
            place = json.dumps({"port": server.getsockname()[1], "token": token})
            # Overwrite: a second job in the same Python process would find the first job's entry.
            state.client.key_value_set(_KEY, place, allow_overwrite=True)
            _in_background(self._accept, server, token)
            return
        place = json.loads(state.client.blocking_key_value_get(_KEY, 1000 * _SECONDS_TO_CONNECT))
        host = state.coordinator_address.rpartition(":")[0].strip("[]")
        peer = socket.create_connection((host, place["port"]), timeout=_SECONDS_TO_CONNECT)
        peer.settimeout(None)
        self._peers.append(peer)
        self._tell({"token": place["token"], "process": self.process, "where": _here()})
        _in_background(self._listen, peer, {"process": 0, "where": host})

    def done(self) -> None:
        """Report that this process reached its end."""
        self._tell({"process": self.process, "status": 0})

    def leave(self, status: int, message: str) -> NoReturn:
        """End this process and tell the others why."""
        self._ending.acquire()
        print(f"prb: {message}", file=sys.stderr)
        self._tell({"process": self.process, "status": status, "message": message, "where": _here()})
        _end(status)

    def uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> NoReturn:
        """Replace ``sys.excepthook``: report a failure here, unless a lost process caused it."""
        if not issubclass(kind, KeyboardInterrupt):
            time.sleep(_SECONDS_FOR_NEWS)  # meanwhile the listening thread may end the process
        self._ending.acquire()
        self._excepthook(kind, error, trace)
        text = first_line(error)
        message = f"error: {kind.__name__}" + (f": {text}" if text else "")
        self._tell({"process": self.process, "status": FAILED, "message": message, "where": _here()})
        _end(FAILED)

    def _accept(self, server: socket.socket, token: str) -> NoReturn:
        while True:
            _in_background(self._listen, server.accept()[0], None, token)

    def _listen(self, peer: socket.socket, known: dict[str, Any] | None, token: str = "") -> None:
        """Follow the process at the other end; its first line identifies it if ``known`` is None."""
        _keep_alive(peer)
        done = False
        for word in _words(peer):
            if known is None:
                if word.get("token") != token:
                    break
                known = {"process": word["process"], "where": word["where"]}
                self._peers.append(peer)
            elif word["status"] == 0:
                done = True
            else:
                self._follow(word, told_by=peer)
        if known is not None and not done:
            self._follow({**known, "status": FAILED}, told_by=peer)
        peer.close()

    def _follow(self, word: dict[str, Any], *, told_by: socket.socket) -> NoReturn:
        """End this process because another one ended, and tell the processes that do not know it yet."""
        self._tell(word, but=told_by)
        self._ending.acquire()
        who = f"process {word['process']} of {self.count}"
        if word.get("where"):
            who += f" ({word['where']})"
        status, message = int(word["status"]), word.get("message")
        if message is None:
            text = f"error: {who} is gone (killed, or its machine was lost), so this process ends too; {_CONTINUES}"
        else:
            text = f"{who} stopped with status {status}, and this process with it: {message}"
        print(f"prb: {text}", file=sys.stderr)
        _end(status, sent=self.process == 0)

    def _tell(self, word: dict[str, Any], *, but: socket.socket | None = None) -> None:
        line = json.dumps(word).encode() + b"\n"
        with self._sending:
            for peer in list(self._peers):
                if peer is not but:
                    with contextlib.suppress(OSError):
                        peer.sendall(line)


def end_alone(status: int, message: str) -> NoReturn:
    """End a process that has not joined a job, after one line on standard error."""
    print(f"prb: {message}", file=sys.stderr)
    _end(status, sent=False)


def listening_socket(port: int, *, backlog: int = 1) -> socket.socket:
    """Return a server socket on all addresses of this machine (port 0: any free port)."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=backlog)


def _words(peer: socket.socket) -> Iterator[dict[str, Any]]:
    # Ends on a reset, on unanswered probes, or on a stranger who found the port.
    with contextlib.suppress(OSError, ValueError), peer.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _in_background(action: Any, *arguments: Any) -> None:
    threading.Thread(target=action, args=arguments, name="job", daemon=True).start()


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux; elsewhere the system's defaults apply
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _here() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _end(status: int, *, sent: bool = True) -> NoReturn:
    """End the process now: a normal exit waits in JAX for the others, which wait for this process.

    Args:
      status: Exit status.
      sent: If True, allow time for sent messages to leave. If False, exit before JAX can print its own report of a
        lost process.
    """
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a progress display hides the cursor
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if sent:
        time.sleep(0.1)
    os._exit(status)
