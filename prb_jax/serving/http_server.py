"""The HTTP server below the application: uvicorn, with a time limit for heads of requests and one way to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from prb_jax.errors import RunError
from prb_jax.serving.limits import Limits

DRAIN_SECONDS = 30
"""How long requests that are being answered are waited for after SIGTERM."""

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with this address, to which clients cannot connect yet.

    Raises:
      RunError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
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
    """Answer requests until SIGTERM or Ctrl-C, and then those that have been received.

    Args:
      app: the application.
      listening: the socket; it is closed.
      limits: for clients.
      ready: is called when requests are answered.
    """
    logger = logging.getLogger("uvicorn.error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        http=_protocol(limits.seconds),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    _Server(config, ready).run(sockets=[listening])


class _Server(uvicorn.Server):
    """As uvicorn's, but a signal that was obeyed is not sent again to the process, which then ends well."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process was faster
            raise RunError(f"cannot serve: {error}") from error
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _protocol(seconds: float) -> type[H11Protocol]:
    class Protocol(H11Protocol):
        """As uvicorn's, but a connection whose next request has no whole head within some time is closed."""

        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._head is not None:
                self._head.cancel()

        def _wait_for_head(self) -> None:
            if self._head is not None:
                self._head.cancel()
            self._head = self.loop.call_later(seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Protocol


class _Lines(logging.Formatter):
    """JSON, as the lines of requests; never a traceback, whose values may be texts of clients."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(time.time(), 3), "level": record.levelname, "message": record.getMessage()}
        return json.dumps(line)
