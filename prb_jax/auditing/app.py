"""The HTTP application of an audit: one page, its script and style, and the requests of the script.

Every answer forbids scripts, styles and connections from elsewhere, and every text of an item goes to the page as JSON.
A request that changes something carries the annotator's token in a header, which no other site can send: it has a JSON
body, its origin is this server's, and on a server for this machine alone its host is this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prb_jax.auditing.answers import CRITERIA, LONGEST_COMMENT, POINTS
from prb_jax.auditing.session import LONGEST_NAME, ClosedError, Session
from prb_jax.errors import DataError, PrbError
from prb_jax.serving.fields import Body
from prb_jax.serving.limits import Limits
from prb_jax.serving.requests import (
    RefusedError,
    bearer,
    check_json,
    check_site,
    error_answer,
    log_request,
    read_body,
    same_token,
)

_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PAGES: Final = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_CLIENT_LEFT: Final = 499
_OTHER: Final = "other"


@dataclass(frozen=True, kw_only=True)
class Auditing:
    """What an application serves.

    Attributes:
      session: the audit at work.
      title: of the page.
      by_name: whether annotators may join by typing a name; else each has a link of his own.
      allowed: who may judge; None for anybody who joined.
      invitation: that must be given with a name; None where none is needed.
      hosts: names by which clients may call the server; None for any.
      limits: for clients.
    """

    session: Session
    title: str
    by_name: bool
    allowed: frozenset[str] | None
    invitation: str | None
    hosts: frozenset[str] | None
    limits: Limits
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "audit"))


def make_app(auditing: Auditing) -> Starlette:
    """Return the application."""
    session = auditing.session

    def current(annotator: str) -> dict[str, Any]:
        return {"annotator": annotator, **vars(session.current(annotator))}

    def task(annotator: str, body: Body) -> dict[str, Any]:
        return current(annotator)

    def draft(annotator: str, body: Body) -> dict[str, Any]:
        session.keep(annotator, body.get("task"), body.get("answer"))
        return {"kept": True}

    def submit(annotator: str, body: Body) -> dict[str, Any]:
        session.submit(annotator, body.get("task"), body.get("answer"))
        return current(annotator)

    def undo(annotator: str, body: Body) -> dict[str, Any]:
        session.undo(annotator)
        return current(annotator)

    def join(body: Body) -> dict[str, Any]:
        if not auditing.by_name:
            raise RefusedError(403, "open the link that you were given: names cannot be typed here")
        invitation = body.get("invitation")
        if auditing.invitation is not None and not (
            isinstance(invitation, str) and same_token(invitation, auditing.invitation)
        ):
            raise RefusedError(
                401, "expected the invitation of this audit: open the link that you were given"
            )
        name, token = session.join(body.get("name"))
        return {"annotator": name, "token": token}

    def known(work: Callable[[str, Body], dict[str, Any]], token: str, body: Body) -> dict[str, Any]:
        annotator = session.annotator(token)
        if annotator is None:
            raise RefusedError(401, "expected the token of an annotator of this audit: join again")
        if auditing.allowed is not None and annotator not in auditing.allowed:
            raise RefusedError(403, f"{annotator} is not among the annotators of this audit now")
        return work(annotator, body)

    async def about(request: Request) -> Response:
        return JSONResponse(
            {
                "title": auditing.title,
                "by_name": auditing.by_name,
                "criteria": CRITERIA,
                "points": POINTS,
                "longest_name": LONGEST_NAME,
                "longest_comment": LONGEST_COMMENT,
            }
        )

    def posted(work: Callable[[Request, Body], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            check_json(request)
            body = await read_body(request, most=auditing.limits.bytes, seconds=auditing.limits.seconds)
            loop = asyncio.get_running_loop()
            return JSONResponse(await loop.run_in_executor(auditing.worker, work, request, body))

        return answer

    routes = [Route(path, _answered(auditing, _page(*page))) for path, page in _PAGES.items()]
    routes.append(Route("/api/about", _answered(auditing, about)))
    routes.append(
        Route("/api/join", _answered(auditing, posted(lambda request, body: join(body))), methods=["POST"])
    )
    for name, work in (("task", task), ("draft", draft), ("submit", submit), ("undo", undo)):
        answer = posted(partial(lambda work, request, body: known(work, bearer(request), body), work))
        routes.append(Route(f"/api/{name}", _answered(auditing, answer), methods=["POST"]))

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)

        async def refuse(request: Request) -> Response:
            raise RefusedError(error.status_code, f"{request.method}: {error.detail}")

        return await _answered(auditing, refuse, path=_OTHER)(request)

    return Starlette(routes=routes, exception_handlers={HTTPException: unknown})


def _page(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    data = files("prb_jax.auditing").joinpath(name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(data, media_type=kind)

    return answer


def _answered(
    auditing: Auditing, handle: Callable[[Request], Awaitable[Response]], *, path: str | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """The handler for requests of this site alone, with every error as an answer, logged."""

    async def answer(request: Request) -> Response:
        begun, failure = time.monotonic(), None
        try:
            check_site(request, auditing.hosts)
            found = await handle(request)
        except RefusedError as error:
            found = error_answer(error.status, str(error), **error.headers)
        except ClosedError as error:
            found = error_answer(409, str(error))
        except DataError as error:
            found = error_answer(400, str(error))
        except PrbError as error:  # the database cannot be written
            failure = error
            found = error_answer(503, "the judgement could not be kept: tell the owner of this audit")
        except ClientDisconnect:
            found = Response(status_code=_CLIENT_LEFT)
        except Exception as error:
            failure = error
            found = error_answer(500, "the server failed: tell the owner of this audit")
        found.headers.update(_HEADERS)
        log_request(path or request.url.path, found.status_code, time.monotonic() - begun, failure)
        return found

    return answer
