"""`prb audit`: serve a page on which people judge pairs, until SIGTERM; this module has the page and its API.

Every response forbids scripts, styles and connections from elsewhere, and the texts of items reach the page as JSON.
A request that changes something has the annotator's token in a header, which no other site can send. It must have a
JSON body and this server's origin; on a server that only this machine can reach, its host must be this machine.
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

from prb_jax.building.auditing.folder import open_folder, read_secret, refuse_pairs
from prb_jax.building.auditing.items import CRITERIA, LONGEST_COMMENT, POINTS
from prb_jax.errors import DataError, PrbError, RunError
from prb_jax.platform.extras import need_extra
from prb_jax.records.writing import held_folder
from prb_jax.scoring.options import Data
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
"""Environment variable with the token that must accompany a typed name."""

LIMITS = Limits(bytes=100_000, seconds=30.0)
"""Limits for clients of the page, whose longest message is an answer."""

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
    """Serve the page of a new or existing audit until SIGTERM or Ctrl-C.

    Settings that are omitted have their defaults in a new audit, and the audit's own values in an existing one.

    Args:
      out: Folder of the audit.
      data: Pairs, as in `prb_jax.evaluate`; required for a new audit.
      gold: Pairs with a certain personal fit, which show whether annotators pay attention.
      subset: Subset of the data.
      limit: Number of comparisons to read from the start of each source.
      sample: Number of comparisons to draw at random.
      per_item: People who judge each item; 3 by default.
      check_every: Average number of judgements per attention check; 10 by default, 0 for none.
      margin: Largest difference of general quality, in points of five, that counts as none; 0.25 by default.
      seed: Seed of sample, orders, sides and resamples; 0 by default.
      annotators: Names of the people who may judge, each with a link; if empty, anybody who types a name.
      lease: Minutes for which a pair stays reserved for an inactive annotator.
      host: Address to serve at; an address beyond loopback requires annotators or an invitation.
      port: Port to serve at; 0 picks a free one.
      invitation: Token that must accompany a typed name; None for none.

    Raises:
      RunError: the folder has another audit or something else, is being served, or was changed by hand; the address
        cannot be used, or is open to others without annotators or an invitation.
      DataError: the data cannot be read, are not pairs, or changed since the audit began.
    """
    need_extra("serve", "prb audit")
    from prb_jax.building.auditing.session import Session
    from prb_jax.serving.connections import address, bind, run_app
    from prb_jax.serving.http_server import is_loopback, local_names

    loopback = is_loopback(host)
    if not loopback and not annotators and invitation is None:
        raise RunError(
            f"--host {host}: other machines could reach the page: name the annotators with --annotators, or set "
            f"{INVITATION} to a token that must accompany a name"
        )
    if not 0 < lease < 1e6:
        raise RunError(f"lease: expected a number of minutes above 0, found {lease:g}")
    refuse_pairs(out)
    path = Path(out)
    with held_folder(path, purpose="serves this audit"), contextlib.ExitStack() as ended:
        chosen = {"subset": subset, "limit": limit, "sample": sample, "seed": seed}
        asked = {"per_item": per_item, "check_every": check_every, "margin": margin}
        folder = open_folder(path, data=data, gold=gold, **chosen, **asked)
        database = folder.open_database(write=True)
        ended.callback(database.close)
        session = Session(database, folder.inputs, lease=60 * lease, secret=read_secret(path))
        links = dict(session.join(name) for name in annotators)
        ended.callback(signal.alarm, 0)  # cancel the alarm after a clean end
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
    """Return the web application; its session runs in the single thread of ``worker``.

    Args:
      allowed: People who may judge, each with a link; None for anybody who types a name.
      invitation: Token that must accompany a name; None if none is required.
      hosts: Host names by which clients may call the server; None for any.
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
            raise RefusedError(403, "this audit accepts no typed names: open the link that you received")
        given = body.get("invitation")
        if invitation is not None and not (isinstance(given, str) and same_token(given, invitation)):
            raise RefusedError(401, "expected the invitation of this audit: open the link that you received")
        name, token = session.join(body.get("name"))
        return {"annotator": name, "token": token}

    def judge(action: str, request: Request, body: Body) -> dict[str, Any]:
        annotator = session.annotator(bearer(request))
        if annotator is None:
            raise RefusedError(401, "expected the token of an annotator of this audit: join again")
        if allowed is not None and annotator not in allowed:
            raise RefusedError(403, f"{annotator} is no longer an annotator of this audit")
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
        failed="the server failed, and your last answer is not stored: tell the owner of this audit",
        headers=_HEADERS,
    )
