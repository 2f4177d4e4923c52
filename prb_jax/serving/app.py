"""The HTTP application: routes, limits, the token, figures, and a log without texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prb_jax.errors import PrbError
from prb_jax.scoring.reader import IdsTooLongError
from prb_jax.serving.engine import BusyError, Engine, Scores
from prb_jax.serving.fields import WHERE, Body
from prb_jax.serving.figures import Figures
from prb_jax.serving.items import NotFiniteError, Score, TooManyCharactersError
from prb_jax.serving.limits import Limits
from prb_jax.serving.requests import (
    RefusedError,
    check_json,
    check_site,
    check_token,
    error_answer,
    log_request,
    read_body,
)
from prb_jax.serving.routes import ROUTES, Asked
from prb_jax.trees.shorten import TooLongError

OTHER = "other"
"""What a path that there is not counts as."""

CLIENT_LEFT = 499
"""The status, in log and figures alone, of a request whose client left before the answer."""

TRUNCATED = "X-PRB-Truncated"
"""Header of an answer: how many responses were scored with a shortened profile or prompt; absent for none."""

IGNORED = "X-PRB-Ignored"
"""Header of an answer: names of fields of the request that changed nothing; absent for none."""


@dataclass(frozen=True)
class Served:
    """What an application serves.

    Attributes:
      name: of the model.
      engine: scores items.
      figures: what is counted.
      limits: for clients.
      token: that clients must send as ``Authorization: Bearer TOKEN``; None for none.
      hosts: without a token, the names by which clients may call the server; None for any.
      identity: everything about the model that decides its scores.
      view: what it is shown of a request.
    """

    name: str
    engine: Engine
    figures: Figures
    limits: Limits
    token: str | None = None
    hosts: frozenset[str] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    view: Mapping[str, Any] = field(default_factory=dict)


def make_app(served: Served) -> Starlette:
    """Return the application."""

    async def health(request: Request) -> Response:
        failed = served.engine.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    async def models(request: Request) -> Response:
        facts = {"identity": dict(served.identity), "view": dict(served.view)}
        return JSONResponse({"object": "list", "data": [{"id": served.name, "object": "model", **facts}]})

    async def metrics(request: Request) -> Response:
        served.figures.waiting.set(served.engine.waiting)
        return Response(served.figures.text(), media_type="text/plain; version=0.0.4")

    def scoring(understand: Callable[[Body], Asked]) -> Callable[[Request], Awaitable[Response]]:
        return lambda request: _score(request, served, understand)

    routes = [
        Route(path, _answered(served, scoring(understand)), methods=["POST"])
        for path, understand in ROUTES.items()
    ]
    routes.append(Route("/health", health))
    routes += [
        Route(path, _answered(served, answer))
        for path, answer in (("/v1/models", models), ("/metrics", metrics))
    ]

    def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        served.figures.requests.labels(OTHER, error.status_code).inc()
        message = f"{request.method} {error.detail}: expected POST to {', '.join(ROUTES)}"
        return error_answer(error.status_code, message, **(error.headers or {}))

    return Starlette(routes=routes, exception_handlers={HTTPException: unknown})


def _answered(
    served: Served, handle: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the token, with every error as an answer, counted and logged."""

    async def answer(request: Request) -> Response:
        begun, path, failure = time.monotonic(), request.url.path, None
        try:
            if served.token is not None:
                check_token(request, served.token)
            else:  # a page in a browser on this machine knows no token, and neither do programs here
                check_site(request, served.hosts)
            found = await handle(request)
        except RefusedError as error:
            found = error_answer(error.status, str(error), **error.headers)
        except (TooLongError, IdsTooLongError, TooManyCharactersError) as error:
            found = error_answer(413, str(error))
        except NotFiniteError as error:
            found = error_answer(422, str(error))
        except BusyError as error:
            found = error_answer(429, str(error), **{"Retry-After": "1"})
        except PrbError as error:
            found = error_answer(400, str(error))
        except ClientDisconnect:
            found = Response(status_code=CLIENT_LEFT)
        except Exception as error:
            failure = error
            found = error_answer(500, "scoring failed: come again later")
        seconds = time.monotonic() - begun
        served.figures.requests.labels(path, found.status_code).inc()
        served.figures.seconds.labels(path).observe(seconds)
        items = getattr(request.state, "items", 0)
        log_request(path, found.status_code, seconds, failure, items=items)
        return found

    return answer


async def _score(request: Request, served: Served, understand: Callable[[Body], Asked]) -> Response:
    limits, begun = served.limits, time.monotonic()
    if served.token is None:
        check_json(request)
    body = await read_body(request, most=limits.bytes, seconds=limits.seconds)
    asked = understand(body)
    ignored = body.ignored()
    request.state.items = len(asked.items)
    if len(asked.items) > limits.items:
        raise RefusedError(
            413, f"{WHERE}: expected at most {limits.items} responses, found {len(asked.items)}"
        )
    try:
        async with asyncio.timeout(limits.seconds - (time.monotonic() - begun)):
            found = await _unless_left(request, served.engine.score(asked.items))
    except TimeoutError:
        message = f"not done within {limits.seconds:g} seconds: come again later"
        raise RefusedError(503, message, **{"Retry-After": "1"}) from None
    scores = _all_scored(found)
    cut = sum(score.truncated for score in scores)
    served.figures.scores.inc(len(scores))
    served.figures.truncated.inc(cut)
    headers = ({TRUNCATED: str(cut)} if cut else {}) | ({IGNORED: _listed(ignored)} if ignored else {})
    return JSONResponse(asked.reply(scores, served.name), headers=headers)


def _listed(names: Sequence[str]) -> str:
    """Names for a header; the ones that would not fit into it are counted."""
    plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 64][:20]
    more = len(names) - len(plain)
    return ", ".join([*plain, *([f"and {more} more"] if more else [])])


async def _unless_left(request: Request, work: Any) -> Scores:
    """The result of the work, which is given up when the client leaves."""
    scoring, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((scoring, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            raise ClientDisconnect
        return scoring.result()
    finally:
        scoring.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _all_scored(found: Scores) -> list[Score]:
    """The scores; a request is answered whole or not at all, never with a default."""
    scores = []
    for number, score in enumerate(found):
        if isinstance(score, PrbError):
            if len(found) > 1:
                score.args = (f"response {number}: {score}",)
            raise score
        scores.append(score)
    return scores
