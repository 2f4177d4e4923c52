"""Every server does the same with a request: the token, the body within its limits, an error, a line of the log."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from prb_jax.data.reading import parse_json
from prb_jax.errors import DataError
from prb_jax.serving.fields import WHERE, Body

LARGE = 1_000_000
"""Bytes of a body that is parsed beside the event loop, so that other requests need not wait for it."""


class RefusedError(Exception):
    """A request that is answered with this status."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer(request: Request) -> str:
    """Return the token that a request carries; empty for none."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        return ""
    return given.strip().encode("latin-1").decode("utf-8", "surrogateescape")  # the bytes that were sent


def same_token(given: str, token: str) -> bool:
    """Whether two tokens are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def check_token(request: Request, token: str | None) -> None:
    """Refuse a request without the token; None asks for none.

    Raises:
      RefusedError: 401.
    """
    if token is not None and not same_token(bearer(request), token):
        message = "expected the header 'Authorization: Bearer TOKEN' with the server's token"
        raise RefusedError(401, message, **{"WWW-Authenticate": "Bearer"})


def local_names(host: str) -> frozenset[str]:
    """Return the names by which clients call a server that this machine alone can reach, at this address."""
    return frozenset({"localhost", "127.0.0.1", "::1", host})


def check_site(request: Request, hosts: frozenset[str] | None) -> None:
    """Refuse what another site asks the browser to send, also under a name of its own for this machine.

    Args:
      request: of a page or of a program; a program has no origin.
      hosts: names by which clients may call the server; None for any.

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


def check_json(request: Request) -> None:
    """Refuse a body that does not say that it is JSON: a page of any site may send other types without asking.

    Raises:
      RefusedError: 415.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(
            415,
            "expected a body of the type application/json, in the header 'Content-Type: application/json'",
        )


def _split(url: str) -> tuple[str | None, str | None]:
    """The host of a URL, and the host with its port; Nones for what is no URL."""
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.netloc
    except ValueError:
        return None, None


async def read_body(request: Request, *, most: int, seconds: float) -> Body:
    """Return the JSON object that a request carries.

    Args:
      request: whose body was not read yet.
      most: bytes.
      seconds: until it must be there.

    Raises:
      RefusedError: it is too long, or comes too late.
      DataError: it is no JSON object.
    """
    try:
        async with asyncio.timeout(seconds):
            data = await _read(request, most)
    except TimeoutError:
        raise RefusedError(408, f"the body did not arrive within {seconds:g} seconds") from None
    return _parsed(data) if len(data) < LARGE else await asyncio.to_thread(_parsed, data)


def error_answer(status: int, message: str, **headers: str) -> Response:
    """Return the answer that tells an error."""
    content = {"error": {"message": message, "code": status}}
    return JSONResponse(content, status_code=status, headers=headers)


def log_request(
    path: str, status: int, seconds: float, failure: BaseException | None = None, **more: Any
) -> None:
    """Print one line on standard error, without anything that a client wrote.

    Args:
      path: of the request, one of those that there are.
      status: of the answer.
      seconds: that it took.
      failure: an error of ours, told by its kind and place; its message may hold texts.
      more: what else stands in the line.
    """
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "path": path,
        "status": status,
        **more,
        "ms": round(1e3 * seconds, 1),
    }
    if failure is not None:
        while failure.__cause__ is not None:
            failure = failure.__cause__
        last = failure.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        line["failure"] = type(failure).__name__
        line["at"] = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last else ""
    print(json.dumps(line), file=sys.stderr, flush=True)


async def _read(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise RefusedError(413, f"expected a body of at most {most:,} bytes, found {int(declared):,}")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise RefusedError(413, f"expected a body of at most {most:,} bytes, found more")
    return bytes(data)


def _parsed(data: bytes) -> Body:
    body = parse_json(data, where=WHERE, error=DataError)
    if not isinstance(body, dict):
        raise DataError(f"{WHERE}: expected a JSON object, found {type(body).__name__}")
    return Body(body)
