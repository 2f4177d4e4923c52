"""The HTTP application of `prb serve`: routes, limits, the token, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prb_jax.errors import PrbError
from prb_jax.scoring.token_ids import IdsTooLongError
from prb_jax.serving.engine import Engine
from prb_jax.serving.http_server import (
    RefusedError,
    check_json,
    check_site,
    check_token,
    local_names,
    make_site,
    read_bytes,
)
from prb_jax.serving.items import NotFiniteError
from prb_jax.serving.jobs import BusyError
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.prefix_cache import PrefixCache
from prb_jax.serving.request_reader import RequestReader
from prb_jax.serving.routes import ROUTES
from prb_jax.serving.scorer_engine import ScorerEngine
from prb_jax.serving.sizes import TooLargeError
from prb_jax.trees.tree import TooLongError

TRUNCATED: Final = "X-PRB-Truncated"
"""Header of an answer: how many responses were scored with a shortened profile or prompt; absent for none."""

IGNORED: Final = "X-PRB-Ignored"
"""Header of an answer: names of fields of the request that changed nothing; absent for none."""

_STATUSES: Final = (
    (TooLongError, 413),
    (IdsTooLongError, 413),
    (TooLargeError, 413),
    (NotFiniteError, 422),
    (BusyError, 429),
    (PrbError, 400),
)
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
    """Metrics of a server: requests and their seconds by path (unknown paths count as "other"), and scores."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of_path: Any = {"labelnames": ["path"], "buckets": _SECONDS, "registry": self.registry}
        of_status: Any = {"labelnames": ["path", "status"], "registry": self.registry}
        self.requests = Counter("prb_requests", "Requests answered.", **of_status)
        self.seconds = Histogram("prb_request_seconds", "Until the answer.", **of_path)
        self.scores = self._counter("scores", "Responses scored.")
        self.truncated = self._counter("truncated", "Responses scored with a shortened profile or prompt.")
        self.batches = self._counter("batches", "Batches given to the device.")
        self.tokens = self._counter("tokens", "Tokens computed, without padding.")
        self.waiting = Gauge("prb_waiting", "Responses that wait for their scores.", registry=self.registry)
        self.cached = Gauge("prb_prefix_cache_bytes", "Bytes in the prefix cache.", registry=self.registry)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"prb_{name}", about, registry=self.registry)

    def count_answer(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)

    def count_batch(self, tokens: int) -> None:
        """Count a batch that starts on the device."""
        self.batches.inc()
        self.tokens.inc(tokens)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


@dataclass(frozen=True)
class ServedModel:
    """The model of an application.

    The options hold the limits for clients and the token that they must send. Without a token, clients must address
    the server by a name of this machine.

    Attributes:
      facts: Entries of `/v1/models`: ``identity`` is everything that decides the scores, ``view`` how the model sees
        texts, ``prefix_cache`` the bytes for prefixes of a reward model, and why there are none.
      cache: Cache of prefixes, if the model keeps any.
    """

    name: str
    engine: Engine | ScorerEngine
    reader: RequestReader
    metrics: ServerMetrics
    options: ServeOptions
    facts: Mapping[str, Any] = field(default_factory=dict)
    cache: PrefixCache | None = None

    def close(self, seconds: float | None = None) -> bool:
        """Score all waiting items and end all threads; return whether the threads ended within this time."""
        self.reader.close()
        return self.engine.close(seconds)


def make_app(served: ServedModel) -> Starlette:
    """Return the application."""
    hosts = local_names(served.options.host)

    def check(request: Request) -> None:
        if served.options.token is not None:
            check_token(request, served.options.token)
            return
        check_site(request, hosts)  # a page of any site may send requests through a browser on this machine
        if request.method == "POST":
            check_json(request)

    async def health(request: Request) -> Response:
        failed = served.engine.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    async def models(request: Request) -> Response:
        entry = {"id": served.name, "object": "model", **served.facts}
        return JSONResponse({"object": "list", "data": [entry]})

    async def metrics(request: Request) -> Response:
        served.metrics.waiting.set(served.engine.waiting)
        served.metrics.cached.set(0 if served.cache is None else served.cache.bytes)
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")

    async def score(request: Request) -> Response:
        return await _score(request, served)

    app = make_site(
        dict.fromkeys(ROUTES, ("POST", score))
        | {"/v1/models": ("GET", models), "/metrics": ("GET", metrics)},
        check=check,
        statuses=_STATUSES,
        failed="scoring failed: try again later",
        unknown=f"expected POST to {', '.join(ROUTES)}",
        count=served.metrics.count_answer,
    )
    app.router.routes.append(Route("/health", health))  # needs no token
    return app


async def _score(request: Request, served: ServedModel) -> Response:
    """Answer a request with all of its scores, or with an error; never with a default score."""
    limits, begun = served.options.limits, time.monotonic()
    body = await read_bytes(request, limits)

    async def work() -> Response:
        wanted = await served.reader.read(request.url.path, body)
        request.state.logged = {"items": len(wanted.items)}
        scores = await served.engine.score(wanted.items)
        cut = sum(score.truncated for score in scores)
        served.metrics.scores.inc(len(scores))
        served.metrics.truncated.inc(cut)
        headers = ({TRUNCATED: str(cut)} if cut else {}) | (
            {IGNORED: wanted.ignored} if wanted.ignored else {}
        )
        return JSONResponse(wanted.reply(scores, served.name), headers=headers)

    try:
        async with asyncio.timeout(limits.seconds - (time.monotonic() - begun)):
            return await _unless_left(request, work())
    except TimeoutError:
        raise RefusedError(503, f"not done within {limits.seconds:g} seconds: try again later") from None


async def _unless_left(request: Request, work: Awaitable[Response]) -> Response:
    """Return the result of the work; cancel the work when the client disconnects."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    scoring, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((scoring, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not scoring.done():
            raise ClientDisconnect
        return scoring.result()
    finally:
        scoring.cancel()
        leaving.cancel()
