"""The HTTP server of `prb serve` and `prb audit`: uvicorn, limits for clients, who may ask, errors as answers, a log.

Nothing that a client wrote stands in the log: one line of JSON for each request has its path, status and time.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from prb_jax.data.reading import parse_json
from prb_jax.errors import DataError, RunError
from prb_jax.serving.fields import WHERE, Body
from prb_jax.serving.options import Limits

DRAIN_SECONDS: Final = 30  # how long requests that are being answered are waited for after SIGTERM

LARGE: Final = 1_000_000
"""Bytes of a body that is parsed beside the event loop, so that other requests need not wait for it."""

CLIENT_LEFT: Final = 499
"""The status, in log and figures alone, of a request whose client left before the answer."""

OTHER: Final = "other"  # the path, in log and figures, of requests for paths that do not exist

Handler = Callable[[Request], Awaitable[Response]]


class RefusedError(Exception):
    """A request that is answered with this status."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with this address, to which clients cannot connect yet; port 0 picks a free one.

    Raises:
      RunError: the address cannot be used.
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
    """Answer requests until SIGTERM or Ctrl-C, and then those received; `ready` is called when the socket is open."""
    logger, handler = logging.getLogger("uvicorn.error"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
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
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    _Server(config, ready).run(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process was faster
            raise RunError(f"cannot serve: {error}") from error
        self._ready()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Obey a signal; uvicorn's own would send it again at the end, and the process would not end with 0."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


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


class _JsonLines(logging.Formatter):
    """Never a traceback, whose values may be texts of clients."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(time.time(), 3), "level": record.levelname, "message": record.getMessage()}
        return json.dumps(line)


def make_site(
    routes: Mapping[str, tuple[str, Handler]],
    *,
    check: Callable[[Request], None],
    statuses: Sequence[tuple[type[Exception], int]],
    failed: str,
    unknown: str = "",
    headers: Mapping[str, str] | None = None,
    count: Callable[[str, int, float], None] = lambda path, status, seconds: None,
) -> Starlette:
    """Return an application in which every error is an answer, and every answer is logged.

    Args:
      routes: by path, the method and the handler.
      check: refuses a request before its handler sees it.
      statuses: of errors, the first that fits; what is no user's error has 500.
      failed: what clients are told where the status is 500 or more: the error's own message may hold texts.
      unknown: what clients are told of a path or method that does not exist.
      headers: of every answer.
      count: is told path, status and seconds of every answer.
    """

    def answered(handle: Handler, *, name: str | None = None) -> Handler:
        async def answer(request: Request) -> Response:
            begun, path, failure = time.monotonic(), name or request.url.path, None
            try:
                check(request)
                response = await handle(request)
            except RefusedError as error:
                response = _error_response(error.status, str(error), error.headers)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception as error:
                status = next((status for kind, status in statuses if isinstance(error, kind)), 500)
                failure = error if status >= 500 else None
                response = _error_response(status, failed if failure else str(error), {})
            response.headers.update(headers or {})
            seconds = time.monotonic() - begun
            count(path, response.status_code, seconds)
            _log(path, response.status_code, seconds, failure, getattr(request.state, "logged", {}))
            return response

        return answer

    async def not_there(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)

        async def refuse(request: Request) -> Response:
            message = f"{request.method} {error.detail}" + (f": {unknown}" if unknown else "")
            raise RefusedError(error.status_code, message, **(error.headers or {}))

        return await answered(refuse, name=OTHER)(request)

    made = [Route(path, answered(handle), methods=[method]) for path, (method, handle) in routes.items()]
    return Starlette(routes=made, exception_handlers={HTTPException: not_there})


def _error_response(status: int, message: str, headers: Mapping[str, str]) -> Response:
    content = {"error": {"message": message, "code": status}}
    later = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(content, status_code=status, headers=later | dict(headers))


def _log(
    path: str, status: int, seconds: float, failure: BaseException | None, more: Mapping[str, Any]
) -> None:
    """One line on standard error; an error of ours is told by its kind and place, as its message may hold texts."""
    line = {"time": round(time.time(), 3), "path": path, "status": status, **more}
    line["ms"] = round(1e3 * seconds, 1)
    if failure is not None:
        while failure.__cause__ is not None:
            failure = failure.__cause__
        place = traceback.extract_tb(failure.__traceback__)[-1:]
        line["failure"] = type(failure).__name__
        line["at"] = "".join(f"{frame.filename}:{frame.lineno}" for frame in place)
    print(json.dumps(line), file=sys.stderr, flush=True)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_names(host: str) -> frozenset[str]:
    """Return the names by which clients call a server that this machine alone can reach, at this address."""
    return frozenset({"localhost", "127.0.0.1", "::1", host})


def bearer(request: Request) -> str:
    """Return the token that a request carries; empty for none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        return ""
    return token.strip().encode("latin-1").decode("utf-8", "surrogateescape")  # the bytes that were sent


def same_token(given: str, token: str) -> bool:
    """Whether two tokens are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def check_token(request: Request, token: str) -> None:
    """Raise RefusedError(401) for a request without the token."""
    if not same_token(bearer(request), token):
        message = "expected the header 'Authorization: Bearer TOKEN' with the server's token"
        raise RefusedError(401, message, **{"WWW-Authenticate": "Bearer"})


def check_site(request: Request, hosts: frozenset[str] | None) -> None:
    """Refuse what another site asks the browser to send, also under a name of its own for this machine.

    `hosts` are the names by which clients may call the server, None for any. A program, unlike a page, has no origin.

    Raises:
      RefusedError: 421 for another name, 403 for another site.
    """
    host = request.headers.get("host", "")
    if hosts is not None and _split(f"//{host}")[0] not in hosts:
        raise RefusedError(421, "expected a request to this machine by its own name, as 127.0.0.1")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        if request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate":
            return  # a link on another site, which may lead here
        raise RefusedError(403, "expected a request from the page of this server")
    origin = request.headers.get("origin")
    if origin is not None and _split(origin)[1] != host:
        raise RefusedError(403, "expected a request from the page of this server")


def _split(url: str) -> tuple[str | None, str | None]:
    """The host of a URL, and the host with its port; Nones for what is no URL."""
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.netloc
    except ValueError:
        return None, None


def check_json(request: Request) -> None:
    """Raise RefusedError(415) for a body that is not said to be JSON: any site's page may send other types unasked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        header = "in the header 'Content-Type: application/json'"
        raise RefusedError(415, f"expected a body of the type application/json, {header}")


async def read_body(request: Request, limits: Limits) -> Body:
    """Return the JSON object that a request carries, whose body was not read yet.

    Raises:
      RefusedError: it is too long (413), or comes too late (408).
      DataError: it is no JSON object.
    """
    most, data = limits.bytes, bytearray()
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise RefusedError(413, f"expected a body of at most {most:,} bytes, found {int(declared):,}")
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise RefusedError(413, f"expected a body of at most {most:,} bytes, found more")
    except TimeoutError:
        raise RefusedError(408, f"the body did not arrive within {limits.seconds:g} seconds") from None
    whole = bytes(data)
    return _parsed(whole) if len(whole) < LARGE else await asyncio.to_thread(_parsed, whole)


def _parsed(data: bytes) -> Body:
    body = parse_json(data, where=WHERE, error=DataError)
    if not isinstance(body, dict):
        raise DataError(f"{WHERE}: expected a JSON object, found {type(body).__name__}")
    return Body(body)
