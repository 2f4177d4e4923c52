"""`prb audit`: a page on which people judge pairs, until SIGTERM: its script and style, and the requests of the script.

Every answer forbids scripts, styles and connections from elsewhere, and every text of an item goes to the page as JSON.
A request that changes something carries the annotator's token in a header, which no other site can send: it has a JSON
body, its origin is this server's, and on a server for this machine alone its host is this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from prb_jax.building.auditing.folder import open_folder, read_secret
from prb_jax.building.auditing.items import CRITERIA, LONGEST_COMMENT, POINTS
from prb_jax.errors import DataError, PrbError, RunError, need_extra
from prb_jax.records.writing import held_folder, refuse_file
from prb_jax.scoring.inputs import Data
from prb_jax.serving.fields import Body
from prb_jax.serving.options import Limits
from prb_jax.serving.request_reader import parse_body

if TYPE_CHECKING:  # starlette comes with an extra
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from prb_jax.building.auditing.session import Session
    from prb_jax.serving.http_server import Handler

INVITATION = "PRB_AUDIT_TOKEN"
"""The environment variable with the token that must come with a name that is typed."""

LIMITS = Limits(bytes=100_000, seconds=30.0)
"""For the clients of the page, who send nothing longer than an answer."""

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


def audit(
    out: str | Path,
    *,
    data: Data | None = None,
    gold: Data | None = None,
    subset: str | None = None,
    limit: int | None = None,
    sample: int | None = None,
    per_item: int | None = None,
    check_every: int | None = None,
    margin: float | None = None,
    seed: int | None = None,
    annotators: Sequence[str] = (),
    lease: float = 30.0,
    host: str = "127.0.0.1",
    port: int = 8000,
    invitation: str | None = None,
) -> None:
    """Serve the page of an audit, a new one or one that goes on, until SIGTERM or Ctrl-C.

    What is left out is the default in a new audit, and the audit's own setting in one that goes on.

    Args:
      out: the folder of the audit.
      data: pairs, as of `prb_jax.evaluate`; needed for a new audit.
      gold: pairs whose personal fit is known for certain, which show whether annotators pay attention.
      subset: of the data.
      limit: of each source, the first so many.
      sample: a random choice of so many of the comparisons.
      per_item: people who judge each item; 3 by default.
      check_every: one judgement in so many is a check, on average; 10 by default, 0 for none.
      margin: differences of general quality within so many points, of the five, make no difference; 0.25 by default.
      seed: of choice, orders, sides and resamples; 0 by default.
      annotators: names of those who may judge, each with a link; if empty, anybody who types a name.
      lease: minutes for which a pair is held for an annotator of whom nothing is heard.
      host: an address; beyond this machine's own loopback there must be annotators or an invitation.
      port: 0 picks a free one.
      invitation: a token that must come with a name that is typed; None for none.

    Raises:
      RunError: the folder holds another audit or something else, is served already, or was changed by hand; the
        address cannot be used, or others could reach it and there is neither annotator nor invitation.
      DataError: the data cannot be read, hold something else than pairs, or changed since the audit began.
    """
    need_extra("serve", "prb audit")
    from prb_jax.building.auditing.session import Session
    from prb_jax.serving.connections import address, bind, run_app
    from prb_jax.serving.http_server import is_loopback, local_names

    loopback = is_loopback(host)
    if not loopback and not annotators and invitation is None:
        raise RunError(
            f"--host {host}: others than this machine could reach the page: name the people with --annotators, or set "
            f"{INVITATION} to a token that must come with a name"
        )
    if not 0 < lease < 1e6:
        raise RunError(f"lease: expected minutes above 0, found {lease:g}")
    refuse_file(out)
    path = Path(out)
    with held_folder(path, purpose="serves this audit"), contextlib.ExitStack() as ended:
        chosen = {"subset": subset, "limit": limit, "sample": sample, "seed": seed}
        asked = {"per_item": per_item, "check_every": check_every, "margin": margin}
        folder = open_folder(path, data=data, gold=gold, **chosen, **asked)
        database = folder.open_database(write=True)
        ended.callback(database.close)
        session = Session(database, folder.inputs, lease=60 * lease, secret=read_secret(path))
        links = dict(session.join(name) for name in annotators)
        ended.callback(signal.alarm, 0)  # ended in time
        worker = ended.enter_context(ThreadPoolExecutor(1, "audit"))
        listening = bind(host, port)
        ended.callback(listening.close)
        app = make_app(
            session,
            title=path.resolve().name,
            allowed=frozenset(links) if links else None,
            invitation=invitation,
            hosts=local_names(host) if loopback else None,
            worker=worker,
        )
        place = address(listening)
        lines = [f"auditing {out} at {place}"]
        lines += [f"{name}: {place}/#token={token}" for name, token in links.items()]
        if not links and invitation is not None:
            lines.append(f"invitation: {place}/#invitation={quote(invitation, safe='')}")
        run_app(app, listening, limits=LIMITS, ready=lambda: print("\n".join(lines), flush=True))


def make_app(
    session: Session,
    *,
    title: str,
    allowed: frozenset[str] | None,
    invitation: str | None,
    hosts: frozenset[str] | None,
    worker: ThreadPoolExecutor,
) -> Starlette:
    """Return the application, whose session works in the one thread of ``worker``.

    Args:
      allowed: who may judge, each with a link; None for anybody who joins by typing a name.
      invitation: that must be given with a name; None where none is needed.
      hosts: names by which clients may call the server; None for any.
    """
    from starlette.responses import JSONResponse, Response

    from prb_jax.building.auditing.session import LONGEST_NAME, ClosedError
    from prb_jax.serving.http_server import (
        RefusedError,
        bearer,
        check_json,
        check_site,
        make_site,
        read_bytes,
        same_token,
    )

    def join(request: Request, body: Body) -> dict[str, Any]:
        if allowed is not None:
            raise RefusedError(403, "open the link that you were given: names cannot be typed here")
        given = body.get("invitation")
        if invitation is not None and not (isinstance(given, str) and same_token(given, invitation)):
            raise RefusedError(
                401, "expected the invitation of this audit: open the link that you were given"
            )
        name, token = session.join(body.get("name"))
        return {"annotator": name, "token": token}

    def judge(action: str, request: Request, body: Body) -> dict[str, Any]:
        annotator = session.annotator(bearer(request))
        if annotator is None:
            raise RefusedError(401, "expected the token of an annotator of this audit: join again")
        if allowed is not None and annotator not in allowed:
            raise RefusedError(403, f"{annotator} is not among the annotators of this audit now")
        if action == "draft":
            session.keep(annotator, body.get("task"), body.get("answer"))
            return {"kept": True}
        if action == "submit":
            session.submit(annotator, body.get("task"), body.get("answer"))
        elif action == "undo":
            session.undo(annotator)
        return {"annotator": annotator, **vars(session.current(annotator))}

    about = {"title": title, "by_name": allowed is None, "criteria": CRITERIA, "points": POINTS}
    about |= {"longest_name": LONGEST_NAME, "longest_comment": LONGEST_COMMENT}

    async def describe(request: Request) -> Response:
        return JSONResponse(about)

    def posted(work: Callable[[Request, Body], dict[str, Any]]) -> Handler:
        async def answer(request: Request) -> Response:
            check_json(request)
            body = parse_body(await read_bytes(request, LIMITS))
            loop = asyncio.get_running_loop()
            return JSONResponse(await loop.run_in_executor(worker, work, request, body))

        return answer

    def served(name: str, kind: str) -> Handler:
        data = files("prb_jax.building.auditing").joinpath(name).read_bytes()

        async def answer(request: Request) -> Response:
            return Response(data, media_type=kind)

        return answer

    routes = {path: ("GET", served(*page)) for path, page in _PAGES.items()}
    routes["/api/about"] = ("GET", describe)
    routes["/api/join"] = ("POST", posted(join))
    for action in ("task", "draft", "submit", "undo"):
        routes[f"/api/{action}"] = ("POST", posted(partial(judge, action)))
    return make_site(
        routes,
        check=lambda request: check_site(request, hosts),
        # 503: the database cannot be written
        statuses=((ClosedError, 409), (DataError, 400), (PrbError, 503)),
        failed="the server failed, and what was sent is not kept: tell the owner of this audit",
        headers=_HEADERS,
    )
