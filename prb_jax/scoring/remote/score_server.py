"""Reward model servers as scorers, over HTTP with retries; a score is never invented.

A request to `prb serve` is one comparison, so the server computes its responses as one tree. A request to vLLM or
SGLang is one conversation: `/classify` or `/pooling` of a sequence classifier returns one number. Requests are
concurrent, so the server can batch them.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from prb_jax.errors import RunError, quote
from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import Message, Turns, is_rendered, turns_of
from prb_jax.records.reading import parse_json
from prb_jax.runs.behaviour import reward_identity
from prb_jax.scoring.remote import TOKEN
from prb_jax.scoring.remote.options import LONGEST_WAIT, RETRIED, retry_after, shown
from prb_jax.scoring.scorer import Scorer
from prb_jax.text.trained_view import served_view
from prb_jax.text.view import ChosenView, TextProtocol, View, ViewOptions, visible
from prb_jax.trees.tree import ScoredBatch, Skip, Truncation, skip_nothing

if TYPE_CHECKING:
    import httpx  # slow to import, so functions import it

    from prb_jax.text.tokenizer import ChatTokenizer

CONCURRENCY = 64  # number of concurrent requests

TRIES = 6
BACKOFF = 1.0  # seconds before the second try of a request; doubled before each further try
SECONDS = 150.0  # time limit of a try; longer than the server's own limit


class ScoreClient(Scorer):
    """Client that requests scores from a server, with concurrent requests and retries.

    It can be pickled to another process, where it opens new connections with the token of that environment.

    Attributes:
      url: URL of the server.
      uses: View options that the server does not decide.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    has_heading: ClassVar[bool] = True
    has_weights: ClassVar[bool] = False

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url, self._client = url, client

    @property
    def decided(self) -> str:
        """Reason why other options have no effect: the server decides."""
        return f"decided by the server {self.url}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _client=open_client())

    def side_by_side(
        self,
        comparisons: Sequence[Comparison],
        score: Callable[[Comparison, threading.Event], Sequence[float]],
        *,
        skip: Skip,
    ) -> Iterator[ScoredBatch]:
        """Yield the scores of one comparison at a time; ``score`` must give up when its event is set."""
        over = threading.Event()
        pool = ThreadPoolExecutor(CONCURRENCY)
        waiting: dict[int, Future[Sequence[float]]] = {
            place: pool.submit(score, comparison, over)
            for place, comparison in enumerate(comparisons)
            if not skip([place])
        }
        try:
            for place, future in waiting.items():
                yield ScoredBatch([place], [np.asarray(future.result(), np.float32)], [0], [Truncation()])
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        tries: int,
        over: threading.Event | None = None,
    ) -> Any:
        """Return the answer of the server, after up to `tries` tries.

        Raises:
          RunError: No answer arrived, or its status is permanent.
        """
        import httpx

        wait, failure, over = BACKOFF, "", over or threading.Event()
        for number in range(tries):
            if number and over.wait(wait * (1 + random.random() / 4)):
                raise RunError("another request failed")
            wait = min(BACKOFF * 2**number, LONGEST_WAIT)
            try:
                answer = self._client.request(method, self.url + path, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == 200:
                return parse_json(answer.content, where=self.url, error=RunError)
            failure = f"status {answer.status_code}: {shown(answer)}"
            if answer.status_code not in RETRIED and answer.status_code < 500:
                hint = f"; set {TOKEN} to the server's token" if answer.status_code == 401 else ""
                raise RunError(f"{self.url}: {failure}{hint}")
            wait = retry_after(answer, wait)
        times = "" if tries == 1 else f" after {tries} tries; the last one"
        raise RunError(f"{self.url}: no answer{times}: {failure}")


class RemoteScorer(ScoreClient):
    """A :class:`prb_jax.scoring.scorer.Scorer` that asks `prb serve`. Build with :func:`open_remote`.

    A pickled copy in another process also checks that the server still serves the same model.
    """

    def __init__(self, url: str, client: httpx.Client) -> None:
        super().__init__(url, client)
        self._model = self._facts(tries=1)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the served model, the same as without a server."""
        return dict(self._model["identity"])

    @property
    def view(self) -> dict[str, Any]:
        """View of the server's model, as fields of `View`."""
        return dict(self._model["view"])

    def choose_view(self, options: ViewOptions) -> ChosenView:
        """Return the view of the server, which decides it."""
        return ChosenView(served_view(self.view))

    def remarks(self, view: View) -> Sequence[str]:
        """Return the facts about the server that a run cannot record."""
        return [
            f"{self.url}: the versions of the libraries that compute there are not known, and not recorded"
        ]

    @property
    def compares(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if the server has a judge that compares the responses of a prompt."""
        return self._model["identity"].get("judge") == "pairs"

    def stream(
        self, comparisons: Sequence[Comparison], *, skip: Skip = skip_nothing, **_: Any
    ) -> Iterator[ScoredBatch]:
        """Yield the scores of one comparison at a time.

        Raises:
          RunError: The server refuses, is gone, now serves another model, or does not return K numbers.
        """
        now = self._facts(tries=TRIES)
        same = reward_identity(now["identity"]) == reward_identity(self._model["identity"])
        if not same or now["view"] != self.view:
            raise RunError(
                f"{self.url}: serves another model or another view than before: expected {quote(self._model)}, "
                f"found {quote(now)}"
            )
        yield from self.side_by_side(comparisons, self._score, skip=skip)

    def _score(self, comparison: Comparison, over: threading.Event) -> list[float]:
        if is_rendered(comparison.prompt):
            raise RunError(
                f"comparison {quote(comparison.id)}: its text is already rendered, but a server needs messages"
            )
        body = json.loads(comparison.context or "{}") | {
            "queries": [[turn.as_dict() for turn in comparison.prompt]],
            "documents": [
                [turn.as_dict() for turn in text.messages] if isinstance(text, Turns) else text
                for text in comparison.responses
            ],
            "user_id": comparison.user_id,
            "profile": [
                {"id": post.id, "category": post.category, "text": post.text} for post in comparison.profile
            ],
            "profile_order": comparison.profile_order,
        }
        answer = self.ask("POST", "/score", body, tries=TRIES, over=over)
        count = len(comparison.responses)
        scores: list[Any] = [entry.get("score") for entry in self._entries(answer)]
        if len(scores) != count or not all(
            type(score) in (int, float) and math.isfinite(score) for score in scores
        ):
            raise RunError(f"expected {count} finite numbers, found {quote(answer)}")
        return scores

    def _entries(self, answer: Any) -> list[dict[str, Any]]:
        """Return the objects in the list "data" of an answer; an entry that is not an object becomes {}."""
        if not isinstance(answer, dict):
            raise RunError(f"{self.url}: expected an answer of `prb serve`, found {quote(answer)}")
        data = answer.get("data")
        return [
            entry if isinstance(entry, dict) else {} for entry in (data if isinstance(data, list) else ())
        ]

    def _facts(self, *, tries: int) -> dict[str, Any]:
        """Return the identity and the view of the served model."""
        answer = self.ask("GET", "/v1/models", tries=tries)
        first = next(iter(self._entries(answer)), {})
        facts = {name: first.get(name) for name in ("identity", "view")}
        if not all(isinstance(fact, dict) and fact for fact in facts.values()):
            raise RunError(
                f"{self.url}: expected a description of the served model from `prb serve`, found {quote(answer)}"
            )
        return facts


class ClassServer(ScoreClient):
    """A :class:`prb_jax.scoring.scorer.Scorer` that asks vLLM or SGLang. Build with :func:`open_class_server`."""

    uses: ClassVar[tuple[str, ...]] = ("profile_posts",)

    def __init__(self, url: str, client: httpx.Client, *, chat: ChatTokenizer | None) -> None:
        parts = urlsplit(url)
        super().__init__(f"{parts.scheme}://{parts.netloc}", client)
        self._route, self._chat = parts.path, chat
        info = self._fact("/get_model_info")
        self._sglang = info is not None
        models = self._fact("/v1/models") or {}
        served = [model for model in models.get("data") or () if isinstance(model, dict)]
        names = [str(model.get("id")) for model in served]
        name = parts.fragment or (names[0] if len(names) == 1 else None)
        if name is None and info is None:
            raise RunError(
                f"{url}: expected #MODEL after the address, one of {', '.join(names) or 'its models'}"
            )
        self._name = name or str((info or {}).get("model_path"))
        if self._sglang and chat is None:
            raise RunError(
                f"{url}: SGLang classifies token ids, not messages: give --tokenizer NAME (of prb ppo "
                "scoring.tokenizer=NAME), whose chat template renders the conversation here"
            )
        model = next((model for model in served if model.get("id") == self._name), {})
        known = {
            "root": model.get("root"),
            "max_model_len": model.get("max_model_len"),
            "server_version": (self._fact("/version") or {}).get("version"),
            "model_path": (info or {}).get("model_path"),
        }
        self._facts = {key: value for key, value in known.items() if value is not None}
        if chat is not None:
            self._facts |= {"tokenizer": chat.name, "template_sha256": chat.template_hash}
        unknown = ["the files of the model", "dtype", *([] if chat else ["chat template", "tokenizer"])]
        self._facts["unknown"] = f"{', '.join(unknown)}: the server alone knows"
        self._remark = f"{self.url}: not known, and not recorded: {', '.join(unknown)}"

    def identity(self) -> dict[str, Any]:
        """Return the name, the facts reported by the server, and a list of unknown facts."""
        named = {"name": self._name, "server": self.url, "route": self._route, "model": self._name}
        return named | self._facts

    def remarks(self, view: View) -> Sequence[str]:
        """Return the facts about the server that a run cannot record."""
        return [self._remark]

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        view: View | None = None,
        skip: Skip = skip_nothing,
        **_: Any,
    ) -> Iterator[ScoredBatch]:
        """Yield the scores of one comparison at a time.

        Raises:
          RunError: The view has another protocol or a maximum length, which the server decides; or the server refuses,
            is gone, or returns several classes.
        """
        view = view or self.choose_view(ViewOptions()).view
        if view.max_length is not None or view.protocol is not TextProtocol.DEFAULT:
            raise RunError(f"max_length, protocol: decided by the server {self.url}; remove them")
        posts = view.profile_posts

        def score(comparison: Comparison, over: threading.Event) -> list[float]:
            seen = visible(comparison, profile_posts=posts, protocol=TextProtocol.DEFAULT)
            conversations = [(*seen.prefix_messages, *turns_of(response)) for response in seen.responses]
            return [self._score(messages, over) for messages in conversations]

        yield from self.side_by_side(comparisons, score, skip=skip)

    def _score(self, messages: Sequence[Message], over: threading.Event) -> float:
        body: dict[str, Any] = {"model": self._name}
        if self._chat is None:
            if messages[0].context or is_rendered(messages):
                raise RunError(
                    f"{self.url}: tools, arguments of a chat template and rendered texts are tokenised here: give "
                    "--tokenizer NAME"
                )
            body["messages"] = [turn.as_dict() for turn in messages]
        else:
            body["input_ids" if self._sglang else "input"] = self._chat.encode(messages)
        if not self._sglang:
            body |= {"activation": False, "use_activation": False}  # the older and the newer name
        answer = self.ask("POST", self._route, body, tries=TRIES, over=over)
        numbers = _numbers(answer)
        if numbers is None or len(numbers) != 1 or not math.isfinite(numbers[0]):
            raise RunError(
                f"{self.url}{self._route}: expected one finite number, the score of a classifier with one label, found "
                f"{quote(answer)}"
            )
        return numbers[0]

    def _fact(self, path: str) -> Mapping[str, Any] | None:
        """Return the server's answer at `path`; None if it has no such route."""
        try:
            answer = self.ask("GET", path, tries=1)
        except RunError as error:
            if "status 404" in str(error) or "status 405" in str(error):
                return None
            raise
        return answer if isinstance(answer, dict) else None


def _numbers(answer: Any) -> list[float] | None:
    """Return the numbers of the only entry: vLLM's `probs` or `data`, SGLang's `embedding`; None without these."""
    data = answer.get("data") if isinstance(answer, dict) else answer
    entry = data[0] if isinstance(data, list) and len(data) == 1 else answer
    if not isinstance(entry, dict):
        return None
    numbers = next((entry[key] for key in ("probs", "data", "embedding") if key in entry), None)
    if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
        return None
    return numbers


def open_remote(url: str) -> RemoteScorer:
    """Return the scorer of a running `prb serve`; the environment variable PRB_SERVE_TOKEN contains its token.

    Raises:
      RunError: Nothing answers at the URL, or the server is not `prb serve`.
    """
    import httpx

    try:
        with_user = bool(httpx.URL(url).userinfo)
    except httpx.InvalidURL as error:
        raise RunError(f"reward {quote(url)}: no URL: {error}") from error
    if with_user:
        raise RunError(f"reward: expected a URL without a user and a password; the token goes into {TOKEN}")
    return RemoteScorer(url.rstrip("/"), open_client())


def open_class_server(
    url: str, *, tokenizer: str | None = None, revision: str | None = None, chat_template: str | None = None
) -> ClassServer:
    """Return the scorer of a server of vLLM (`/classify`, `/pooling`) or SGLang (`/classify`).

    Args:
      url: URL with the route, and the model's name if there are several, e.g. http://HOST:PORT/classify#MODEL.
      tokenizer: Folder or hub id of the model's tokenizer; its chat template renders conversations in the client. If
        not given, the server renders messages.
      revision, chat_template: Options of the tokenizer.

    Raises:
      RunError: Nothing answers at the URL, or the model to ask is unknown.
    """
    if tokenizer is None:
        if revision is not None or chat_template is not None:
            raise RunError("revision, chat_template: require --tokenizer NAME")
        return ClassServer(url, open_client(), chat=None)
    from prb_jax.text.open_tokenizer import load_tokenizer  # slow to import

    chat = load_tokenizer(tokenizer, revision=revision, chat_template=chat_template)
    return ClassServer(url, open_client(), chat=chat)


def open_client() -> httpx.Client:
    """Return a client with the token of the environment."""
    import httpx

    token = os.environ.get(TOKEN)
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=SECONDS,
        limits=httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY),
    )
