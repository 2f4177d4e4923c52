"""A reward model behind `prb serve`: asked over HTTP, patiently, and never with a score of its own.

One request is one comparison, so that its responses are one tree there; many requests are under way at a time, and the
server scores all that wait together.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.reading import parse_json
from prb_jax.errors import RunError, quote
from prb_jax.remote.retry import LONGEST_WAIT, RETRIED, retry_after, shown
from prb_jax.runs.behaviour import reward_identity
from prb_jax.trees.tree import ScoredBatch, Truncation

if TYPE_CHECKING:
    import httpx  # takes long to import: the functions that need it do so

TOKEN = "PRB_SERVE_TOKEN"
"""The environment variable with the token of a server and its clients."""

CONCURRENCY = 64
"""Requests that are under way at a time."""

TRIES = 6
BACKOFF = 1.0
"""Seconds before the second try of a request; twice as many before each further one."""

SECONDS = 150.0
"""Until a try is given up; longer than a server of its own accord takes."""


class ScoreClient:
    """Asks a server for scores, many requests at a time, each of them patiently.

    Another process may be given it (pickle): it opens connections of its own there, with the token of its own
    environment.

    Attributes:
      url: of the server.
      uses: the options of what is shown that it does not decide.
    """

    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url, self._client = url, client

    @property
    def decided(self) -> str:
        """Who decides about all other options."""
        return f"decided by the server {self.url}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _client=open_client())

    def side_by_side(
        self,
        comparisons: Sequence[Comparison],
        score: Callable[[Comparison, threading.Event], np.ndarray],
        *,
        skip: Callable[[Sequence[int]], bool],
    ) -> Iterator[ScoredBatch]:
        """Yield the scores of one comparison after the other; ``score`` gives up where its event is set."""
        over = threading.Event()
        pool = ThreadPoolExecutor(CONCURRENCY)
        waiting: dict[int, Future[np.ndarray]] = {
            place: pool.submit(score, each, over)
            for place, each in enumerate(comparisons)
            if not skip([place])
        }
        try:
            for place, future in waiting.items():
                yield ScoredBatch([place], [future.result()], [0], [Truncation()])
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, tries: int, over: threading.Event
    ) -> Any:
        """Return the answer of the server, after as many tries as it takes.

        Raises:
          RunError: there is none, or a status that no further try would change.
        """
        import httpx

        wait, failure = BACKOFF, ""
        for number in range(tries):
            if number and over.wait(wait * (1 + random.random() / 4)):
                raise RunError("another request failed")
            wait = min(BACKOFF * 2**number, LONGEST_WAIT)
            try:
                answer = self._client.request(method, self.url + path, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in RETRIED or answer.status_code >= 500:
                failure, wait = f"status {answer.status_code}: {shown(answer)}", retry_after(answer, wait)
                continue
            if answer.status_code != 200:
                hint = f"; set {TOKEN} to the server's token" if answer.status_code == 401 else ""
                raise RunError(f"{self.url}: status {answer.status_code}: {shown(answer)}{hint}")
            return parse_json(answer.content, where=self.url, error=RunError)
        times = "" if tries == 1 else f" after {tries} tries; the last one"
        raise RunError(f"{self.url}: no answer{times}: {failure}")


class RemoteScorer(ScoreClient):
    """A :class:`prb_jax.scoring.scorer.Scorer` that asks a server. Build with :func:`open_remote`.

    In another process too it holds the server to the same model.
    """

    def __init__(self, url: str, client: httpx.Client) -> None:
        super().__init__(url, client)
        self._model = self._facts(tries=1)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the model that is served, as it is without a server."""
        return dict(self._model["identity"])

    @property
    def view(self) -> dict[str, Any]:
        """What the server shows its model of a comparison."""
        return dict(self._model["view"])

    @property
    def remarks(self) -> list[str]:
        """What a run should say of the server."""
        return [
            f"{self.url}: the versions of the libraries that compute there are not known, and not recorded"
        ]

    def stream(self, comparisons: Sequence[Comparison], *, skip: Any, **_: Any) -> Iterator[ScoredBatch]:
        """Yield the scores of one comparison after the other.

        Raises:
          RunError: the server refuses, is gone, serves another model by now, or answers with anything but K numbers.
        """
        now = self._facts(tries=TRIES)
        if (
            reward_identity(now["identity"]) != reward_identity(self._model["identity"])
            or now["view"] != self.view
        ):
            raise RunError(
                f"{self.url}: serves another model by now, or shows it something else: expected {quote(self._model)}, "
                f"found {quote(now)}"
            )
        yield from self.side_by_side(comparisons, self._score, skip=skip)

    def _score(self, comparison: Comparison, over: threading.Event) -> np.ndarray:
        body = {
            "queries": [[{"role": each.role, "content": each.content} for each in comparison.prompt]],
            "documents": list(comparison.responses),
            "user_id": comparison.user_id,
            "profile": [
                {"id": each.id, "category": each.category, "text": each.text} for each in comparison.profile
            ],
            "profile_order": comparison.profile_order,
        }
        answer = self.ask("POST", "/score", body, tries=TRIES, over=over)
        data, count = self._data(answer), len(comparison.responses)
        found: list[Any] = [each.get("score") if isinstance(each, dict) else None for each in data or ()]
        if len(found) != count or not all(
            type(each) in (int, float) and math.isfinite(each) for each in found
        ):
            raise RunError(f"expected {count} finite numbers, found {quote(answer)}")
        return np.asarray(found, np.float32)

    def _data(self, answer: Any) -> Any:
        if not isinstance(answer, dict):
            raise RunError(f"{self.url}: expected an answer of `prb serve`, found {quote(answer)}")
        return answer.get("data")

    def _facts(self, *, tries: int) -> dict[str, Any]:
        """Identity of the model and what it is shown."""
        answer = self.ask("GET", "/v1/models", None, tries=tries, over=threading.Event())
        models = self._data(answer)
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not all(
            isinstance(first.get(name), dict) and first[name] for name in ("identity", "view")
        ):
            raise RunError(
                f"{self.url}: expected a `prb serve` that says what it serves, found {quote(answer)}"
            )
        return {name: first[name] for name in ("identity", "view")}


def open_remote(url: str) -> RemoteScorer:
    """Return the scorer of a running `prb serve`; its token is in the environment variable PRB_SERVE_TOKEN.

    Raises:
      RunError: nothing answers there, or something else than `prb serve`.
    """
    import httpx

    try:
        with_user = bool(httpx.URL(url).userinfo)
    except httpx.InvalidURL as error:
        raise RunError(f"reward {quote(url)}: no URL: {error}") from error
    if with_user:
        raise RunError(f"reward: expected a URL without a user and a password; the token goes into {TOKEN}")
    return RemoteScorer(url.rstrip("/"), open_client())


def open_client() -> httpx.Client:
    """Return a client with the token of the environment."""
    import httpx

    token = os.environ.get(TOKEN)
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=SECONDS,
        limits=httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY),
    )
