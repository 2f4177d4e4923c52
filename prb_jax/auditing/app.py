"""The HTTP application of an audit: one page, its script and style, and the requests of the script.

Every answer forbids scripts, styles and connections from elsewhere, and every text of an item goes to the page as JSON.
A request that changes something carries the annotator's token in a header, which no other site can send: it has a JSON
body, its origin is this server's, and on a server for this machine alone its host is this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from prb_jax.auditing.items import CRITERIA, LONGEST_COMMENT, POINTS
from prb_jax.auditing.session import LONGEST_NAME, ClosedError, Session
from prb_jax.errors import DataError, PrbError
from prb_jax.serving.fields import Body
from prb_jax.serving.http_server import (
    Handler,
    RefusedError,
    bearer,
    check_json,
    check_site,
    make_site,
    read_body,
    same_token,
)
from prb_jax.serving.options import Limits

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


def make_app(
    session: Session,
    *,
    title: str,
    allowed: frozenset[str] | None,
    invitation: str | None,
    hosts: frozenset[str] | None,
    limits: Limits,
    worker: ThreadPoolExecutor,
) -> Starlette:
    """Return the application.

    Args:
      session: the audit at work.
      title: of the page.
      allowed: who may judge, each with a link; None for anybody who joins by typing a name.
      invitation: that must be given with a name; None where none is needed.
      hosts: names by which clients may call the server; None for any.
      limits: for clients.
      worker: the one thread in which the session works.
    """

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
        if allowed is not None:
            raise RefusedError(403, "open the link that you were given: names cannot be typed here")
        given = body.get("invitation")
        if invitation is not None and not (isinstance(given, str) and same_token(given, invitation)):
            raise RefusedError(
                401, "expected the invitation of this audit: open the link that you were given"
            )
        name, token = session.join(body.get("name"))
        return {"annotator": name, "token": token}

    def known(work: Callable[[str, Body], dict[str, Any]], request: Request, body: Body) -> dict[str, Any]:
        annotator = session.annotator(bearer(request))
        if annotator is None:
            raise RefusedError(401, "expected the token of an annotator of this audit: join again")
        if allowed is not None and annotator not in allowed:
            raise RefusedError(403, f"{annotator} is not among the annotators of this audit now")
        return work(annotator, body)

    async def about(request: Request) -> Response:
        return JSONResponse(
            {
                "title": title,
                "by_name": allowed is None,
                "criteria": CRITERIA,
                "points": POINTS,
                "longest_name": LONGEST_NAME,
                "longest_comment": LONGEST_COMMENT,
            }
        )

    def posted(work: Callable[[Request, Body], dict[str, Any]]) -> Handler:
        async def answer(request: Request) -> Response:
            check_json(request)
            body = await read_body(request, limits)
            loop = asyncio.get_running_loop()
            return JSONResponse(await loop.run_in_executor(worker, work, request, body))

        return answer

    routes = {path: ("GET", _page(*page)) for path, page in _PAGES.items()}
    routes["/api/about"] = ("GET", about)
    routes["/api/join"] = ("POST", posted(lambda request, body: join(body)))
    for work in (task, draft, submit, undo):
        routes[f"/api/{work.__name__}"] = ("POST", posted(partial(known, work)))
    return make_site(
        routes,
        check=lambda request: check_site(request, hosts),
        statuses=(
            (ClosedError, 409),
            (DataError, 400),
            (PrbError, 503),
        ),  # 503: the database cannot be written
        failed="the server failed, and what was sent is not kept: tell the owner of this audit",
        headers=_HEADERS,
    )


def _page(name: str, kind: str) -> Handler:
    data = files("prb_jax.auditing").joinpath(name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(data, media_type=kind)

    return answer
