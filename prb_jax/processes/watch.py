"""Connections of the processes of one job: each one that ends is noticed by the others, which end too.

Every process holds a connection to process 0, and the operating system closes it however its process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any, NoReturn

FAILED = 1
"""Status of a process whose neighbour is gone, or that failed with a traceback."""

_KEY = "prb_jax/job"
_SECONDS_TO_CONNECT = 60
# An error may be the first sign that a neighbour is gone: its own word comes sooner than this.
_SECONDS_FOR_NEWS = 3.0
# Idle, between probes, and probes: a machine that is gone is noticed after 30 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_CONTINUES = "the same command continues the run, also with another number of processes"


class Watch:
    """What both ends of the connections have in common."""

    def __init__(self, state: Any) -> None:
        self.process, self.count = int(state.process_id), int(state.num_processes)
        self._excepthook = sys.excepthook
        self._ending = threading.Lock()
        self._sending = threading.Lock()

    def peers(self) -> list[socket.socket]:
        raise NotImplementedError

    def listen(self) -> None:
        raise NotImplementedError

    def tell(self, word: dict[str, Any], *, but: socket.socket | None = None) -> None:
        """Sends one line to all that are connected."""
        line = json.dumps(word).encode() + b"\n"
        with self._sending:
            for peer in self.peers():
                if peer is not but:
                    with contextlib.suppress(OSError):
                        peer.sendall(line)

    def done(self) -> None:
        """Says that this process came to its end."""
        self.tell({"process": self.process, "status": 0})

    def leave(self, status: int, message: str) -> NoReturn:
        """Ends this process, and tells why."""
        self._ending.acquire()
        print(f"prb: {message}", file=sys.stderr)
        self.tell({"process": self.process, "status": status, "message": message, "where": _here()})
        _end(status)

    def uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> NoReturn:
        """In place of ``sys.excepthook``: what failed here, unless it failed because a neighbour is gone."""
        if not issubclass(kind, KeyboardInterrupt):
            time.sleep(_SECONDS_FOR_NEWS)  # the other thread ends the process
        self._ending.acquire()
        self._excepthook(kind, error, trace)
        text = str(error).strip().split("\n")[0]
        message = f"error: {kind.__name__}" + (f": {text}" if text else "")
        self.tell({"process": self.process, "status": FAILED, "message": message, "where": _here()})
        _end(FAILED)

    def follow(self, word: dict[str, Any]) -> NoReturn:
        """Ends this process because another one did."""
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


class Hub(Watch):
    """Process 0: the others connect to it, and what one says is handed on to all."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._server = listening_socket(0, backlog=self.count)
        self._token = secrets.token_hex(16)
        self._lines: dict[socket.socket, _Lines] = {}
        self._known: dict[socket.socket, dict[str, Any]] = {}
        self._done: set[int] = set()
        place = {"port": self._server.getsockname()[1], "token": self._token}
        # A second job in the same Python process would find the first one's.
        state.client.key_value_set(_KEY, json.dumps(place), allow_overwrite=True)

    def peers(self) -> list[socket.socket]:
        return list(self._known)

    def listen(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._server, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._server:
                    peer, _ = self._server.accept()
                    _keep_alive(peer)
                    self._lines[peer] = _Lines(peer)
                    selector.register(peer, selectors.EVENT_READ)
                    continue
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                words = self._lines[peer].read()
                for word in words or ():
                    self._hear(peer, word)
                if words is None:
                    selector.unregister(peer)
                    self._lost(peer)

    def _hear(self, peer: socket.socket, word: dict[str, Any]) -> None:
        if peer not in self._known:
            if word.get("token") == self._token:
                self._known[peer] = {"process": word["process"], "where": word["where"]}
            return
        if word["status"] == 0:
            self._done.add(word["process"])
            return
        self.tell(word, but=peer)
        self.follow(word)

    def _lost(self, peer: socket.socket) -> None:
        known = self._known.pop(peer, None)
        del self._lines[peer]
        peer.close()
        if known is not None and known["process"] not in self._done:
            word = {**known, "status": FAILED}
            self.tell(word)
            self.follow(word)


class Spoke(Watch):
    """Every other process."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        milliseconds = 1000 * _SECONDS_TO_CONNECT
        place = json.loads(state.client.blocking_key_value_get(_KEY, milliseconds))
        self._host = state.coordinator_address.rpartition(":")[0].strip("[]")
        self._peer = socket.create_connection((self._host, place["port"]), timeout=_SECONDS_TO_CONNECT)
        self._peer.settimeout(None)
        _keep_alive(self._peer)
        self.tell({"token": place["token"], "process": self.process, "where": _here()})

    def peers(self) -> list[socket.socket]:
        return [self._peer]

    def listen(self) -> None:
        lines, done = _Lines(self._peer), False
        while (words := lines.read()) is not None:
            for word in words:
                if word["status"] != 0:
                    self.follow(word)
                done = True
        if not done:
            self.follow({"process": 0, "where": self._host, "status": FAILED})


class _Lines:
    """JSON lines from a connection."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._rest = peer, b""

    def read(self) -> list[dict[str, Any]] | None:
        """What has come, at least a part of a line; None at the end of the connection."""
        try:
            data = self._peer.recv(65_536)
        except OSError:  # reset, or no answer to the probes
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:  # someone else, who found the port
            return None


def listening_socket(port: int, *, backlog: int = 1) -> socket.socket:
    """A server at a port (0: a free one) of all addresses of this machine."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=backlog)


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux; elsewhere the system's own times hold
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _here() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def end_alone(status: int, message: str) -> NoReturn:
    """Ends a process that is in no job yet, after one line on standard error."""
    print(f"prb: {message}", file=sys.stderr)
    _end(status, sent=False)


def _end(status: int, *, sent: bool = True) -> NoReturn:
    """Ends the process now: at a normal exit JAX would wait for the others, who wait for us.

    Args:
      status: of the process.
      sent: something was sent, and is given time to go out. Where nothing was, JAX gets no time for its own report
        of a neighbour that is gone.
    """
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a progress display had hidden the cursor
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if sent:
        time.sleep(0.1)
    os._exit(status)
