"""The HTTP site of `prb serve` and `prb audit`: routes, access checks, error answers, request bodies and the log.

The log contains no text of a client: each request logs one line of JSON with its path, status and time.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prb_jax.serving.options import Limits

CLIENT_LEFT: Final = 499
"""The status, in log and figures alone, of a request whose client left before the answer."""

OTHER: Final = "other"  # stands for all unknown paths in the log and the metrics

Handler = Callable[[Request], Awaitable[Response]]


class RefusedError(Exception):
    """A request that the server refuses with this status."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


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
    """Return an application that turns every error into an answer and logs every answer.

    Args:
      routes: Method and handler of each path.
      check: Check that runs before the handler and raises to refuse a request.
      statuses: Status of each error class; the first match counts. Errors without a match get 500.
      failed: Message for clients if the status is 500 or more, because the error's own message may contain texts.
      unknown: Message for clients that ask for an unknown path or method.
      headers: Headers of every answer.
      count: Callback for the path, status and seconds of every answer.
    """

    def answered(handle: Handler, *, name: str | None = None) -> Handler:
        async def answer(request: Request) -> Response:
            begun, path, failure = time.monotonic(), name or request.url.path, None
            try:
                check(request)
                response = await handle(request)
            except RefusedError as error:
                response = error_response(error.status, str(error), error.headers)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception as error:
                status = next((status for kind, status in statuses if isinstance(error, kind)), 500)
                failure = error if status >= 500 else None
                response = error_response(status, failed if failure else str(error), {})
            response.headers.update(headers or {})
            seconds = time.monotonic() - begun
            count(path, response.status_code, seconds)
            log_answer(path, response.status_code, seconds, failure, getattr(request.state, "logged", {}))
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


def error_response(status: int, message: str, headers: Mapping[str, str]) -> Response:
    """Return the JSON answer for an error."""
    content = {"error": {"message": message, "code": status}}
    later = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(content, status_code=status, headers=later | dict(headers))


def log_answer(
    path: str,
    status: int,
    seconds: float,
    failure: BaseException | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print one line on standard error. A failure shows only its type and place: its message may contain texts."""
    line = {"time": round(time.time(), 3), "path": path, "status": status, **(more or {})}
    line["ms"] = round(1e3 * seconds, 1)
    if failure is not None:
        while failure.__cause__ is not None:
            failure = failure.__cause__
        place = traceback.extract_tb(failure.__traceback__)[-1:]
        line["failure"] = type(failure).__name__
        line["at"] = "".join(f"{frame.filename}:{frame.lineno}" for frame in place)
    print(json.dumps(line), file=sys.stderr, flush=True)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_names(host: str) -> frozenset[str]:
    """Return the names that clients use for a loopback-only server at this address."""
    return frozenset({"localhost", "127.0.0.1", "::1", host})


def bearer(request: Request) -> str:
    """Return the token of a request; empty if there is none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        return ""
    return token.strip().encode("latin-1").decode("utf-8", "surrogateescape")  # the bytes as sent


def same_token(given: str, token: str) -> bool:
    """Return whether two tokens are equal; the time taken does not reveal where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def check_token(request: Request, token: str) -> None:
    """Raise RefusedError(401) for a request without the token."""
    if not same_token(bearer(request), token):
        message = "expected the header 'Authorization: Bearer TOKEN' with the server's token"
        raise RefusedError(401, message, **{"WWW-Authenticate": "Bearer"})


def check_site(request: Request, hosts: frozenset[str] | None) -> None:
    """Refuse requests that another site makes the browser send, even under another host name for this machine.

    `hosts` are the names that clients may use for the server; None allows any. Programs, unlike pages, send no origin.

    Raises:
      RefusedError: The host has another name (status 421), or another site sent the request (403).
    """
    host = request.headers.get("host", "")
    if hosts is not None and _split(f"//{host}")[0] not in hosts:
        raise RefusedError(421, "expected a request to this machine by its own name, as 127.0.0.1")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        if request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate":
            return  # links on other sites may lead here
        raise RefusedError(403, "expected a request from the page of this server")
    origin = request.headers.get("origin")
    if origin is not None and _split(origin)[1] != host:
        raise RefusedError(403, "expected a request from the page of this server")


def _split(url: str) -> tuple[str | None, str | None]:
    """Return the host of a URL, and the host with its port; Nones if the URL is invalid."""
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.netloc
    except ValueError:
        return None, None


def check_json(request: Request) -> None:
    """Raise RefusedError(415) unless the content type is JSON: browsers send other types cross-site without asking."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        header = "in the header 'Content-Type: application/json'"
        raise RefusedError(415, f"expected a body of the type application/json, {header}")


async def read_bytes(request: Request, limits: Limits) -> bytes:
    """Return the body of a request, still unread.

    Raises:
      RefusedError: If the body is too long (413) or arrives too late (408).
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
    return bytes(data)
