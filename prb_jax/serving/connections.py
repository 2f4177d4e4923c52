"""Client connections, with uvicorn: time limits, the number of connections, and how the server shuts down."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from prb_jax.errors import RunError
from prb_jax.serving.http_server import OTHER, error_response, log_answer
from prb_jax.serving.options import Limits

DRAIN_SECONDS: Final = 24  # how long shutdown waits for requests that were already received
LAST_SECONDS: Final = 3  # how long shutdown then waits for the server's own threads
END_SECONDS: Final = 29
"""Seconds after SIGTERM in which the process ends, whatever it does: many managers of processes kill it after 30."""

READ_BYTES: Final = 8192  # read at once from a connection: others wait while these bytes are parsed

FRAMING_BYTES: Final = 65_536
"""Bytes of a chunked body that may mark its chunks, besides a sixteenth of the body: each chunk costs some 50 us."""

PROBE_SECONDS: Final = 1.0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address; clients cannot connect yet. Port 0 picks a free port.

    Raises:
      RunError: If the address cannot be used.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise RunError(f"cannot serve at {host}:{port}: {error}") from error
    return listening


def address(listening: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_app(
    app: Starlette, listening: socket.socket, *, limits: Limits, ready: Callable[[], None] = lambda: None
) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish the requests already received.

    Calls `ready` when the socket is open. The signal also sets an alarm that ends the process after `END_SECONDS`;
    a caller that finishes earlier cancels the alarm with ``signal.alarm(0)``.
    """
    logger, handler = logging.getLogger("uvicorn.error"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        await (_refusal(scope, len(server.server_state.connections), limits) or app)(scope, receive, send)

    config = uvicorn.Config(
        guarded,
        http=_protocol(limits.seconds),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = _Server(config, ready)
    server.run(sockets=[listening])


def _refusal(scope: Any, connections: int, limits: Limits) -> Response | None:
    """Return a refusal that also closes the connection, or None if the routes may handle the request."""
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        # the boundary between two requests would be ambiguous (RFC 9112, section 6.1)
        status, message = 400, "expected Content-Length or Transfer-Encoding, found both"
    elif connections > limits.connections:
        status, message = 503, f"more than {limits.connections} connections: try again later"
    else:
        return None
    log_answer(OTHER, status, 0.0)
    return error_response(status, message, {"Connection": "close"})


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process took the address first
            raise RunError(f"cannot serve: {error}") from error
        self._ready()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Shut down on a signal. uvicorn's own handler would raise it again, and the exit status would not be 0."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        if not self.should_exit:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(END_SECONDS)
        self.should_exit = True


def _protocol(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with protection against slow or hostile clients."""
    received = bytearray(READ_BYTES)

    class Protocol(H11Protocol, asyncio.BufferedProtocol):
        """Closes connections that send no complete head, or do not read their answer, within `seconds`.

        A client that has closed its sending side after a whole request gets its answer.
        """

        _idle: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _probing: asyncio.TimerHandle | None = None
        _measured: RequestResponseCycle | None = None
        _body = _framing = 0  # bytes received of the measured request

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._idle, self._unread, self._probing):
                if timer is not None:
                    timer.cancel()

        def get_buffer(self, sizehint: int) -> bytearray:
            return received

        def buffer_updated(self, nbytes: int) -> None:
            self.data_received(bytes(received[:nbytes]))

        def data_received(self, data: bytes) -> None:
            before = 0 if self.cycle is None else len(self.cycle.body)
            super().data_received(data)
            cycle = self.cycle
            if cycle is not self._measured:
                self._measured, self._body, self._framing = cycle, 0, 0
            elif cycle is not None and cycle.more_body and not cycle.response_complete:
                gained = len(cycle.body) - before
                self._body, self._framing = self._body + gained, self._framing + len(data) - gained
                if self._framing > FRAMING_BYTES + self._body // 16:
                    self.send_400_response("expected a body in larger chunks, or with Content-Length")

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._probing is not None and self.cycle.response_complete:
                self.transport.close()  # the client has closed its sending side
            self._wait_for_head()

        def _wait_for_head(self) -> None:
            if self._idle is not None:
                self._idle.cancel()
            self._idle = self.loop.call_later(seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()  # discards an answer that the client has not read

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def eof_received(self) -> Any:
            """Return whether the connection stays open for an answer after the client closed its sending side."""
            cycle = self.cycle
            if cycle is None or cycle.more_body or cycle.response_complete:
                return False
            self._probing = self.loop.call_later(PROBE_SECONDS, self._probe)
            return True

        def _probe(self) -> None:
            """Write to a client that may be gone: only a failed write shows this, and then its work is cancelled.

            Every HTTP/1.1 client must accept an interim response.
            """
            if not self.cycle.response_started and self.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._probing = self.loop.call_later(PROBE_SECONDS, self._probe)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.abort()
                return
            answer = error_response(400, msg, {"Connection": "close"})
            head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
            events = (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
            self.transport.close()

    return Protocol


class _JsonLines(logging.Formatter):
    """Log lines as JSON without tracebacks, because a traceback may contain texts of clients."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(time.time(), 3), "level": record.levelname, "message": record.getMessage()}
        return json.dumps(line)
