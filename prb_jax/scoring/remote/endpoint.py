"""A client for endpoints with OpenAI's chat API: it retries, counts requests, and never invents an answer.

Every reply is cached in a folder under the digest of its request, so a restarted command sends no request twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import threading
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import httpx

from prb_jax.errors import PrbWarning, RunError, quote
from prb_jax.records.comparison import Message
from prb_jax.records.reading import parse_json, read_object
from prb_jax.records.writing import write_file
from prb_jax.scoring.remote.options import (
    KEY,
    LENGTH_FIELDS,
    LONGEST_WAIT,
    RETRIED,
    EndpointOptions,
    retry_after,
    without_key,
)

REPLIES = "replies"  # subfolder of a run: cached replies, named by the digest of the request

LARGEST_ANSWER = 16_000_000
"""Maximum size of an answer in bytes; 4,096 tokens with 20 alternatives each have about 6,000,000."""

HOPELESS: Final = frozenset({401, 403, 404})  # statuses that every further request would get too

_REFUSED_TEMPERATURE: Final = re.compile(
    r"temperature.*(not support|unsupported|deprecated|only the default)|(not support|unsupported).*temperature",
    re.I | re.S,
)

TRIES: Final = "prb_tries"  # field of a cached answer: number of tries


@dataclass(frozen=True)
class Reply:
    """The reply of a model."""

    text: str  # empty if the endpoint reports null content
    # prompt_tokens, completion_tokens: counts by the server; None if not reported
    prompt_tokens: int | None
    completion_tokens: int | None
    # each token with the most probable tokens at its position and their log-probabilities; None if not
    # requested
    alternatives: Sequence[tuple[str, Sequence[tuple[str, float]]]] | None = None
    # finish reason: "stop", "length" or another word of the server; None if not reported
    finish: str | None = None
    tries: int = field(default=1, compare=False)  # number of tries

    @property
    def is_cut(self) -> bool:
        """True if the reply reached the token limit, so its verdict may be missing or premature."""
        return self.finish == "length"


class NoReplyError(RunError):
    """An endpoint gave no reply to one request; other requests may succeed."""


class Endpoint:
    """Client for one model of one endpoint; the folder ``cache``, if given, stores replies.

    If the endpoint refuses a temperature, later requests omit it, with a warning. If ``exact``, this is an error.

    Attributes:
      options: Options of the endpoint.
      asked: Number of requests sent, including retries.
    """

    def __init__(self, options: EndpointOptions, *, cache: Path | None, exact: bool = False) -> None:
        if not options.url.startswith(("http://", "https://")):
            raise RunError(f"--endpoint: expected a URL with http:// or https://, found {quote(options.url)}")
        key = options.key or ""
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise RunError(
                f"{KEY}: expected printable ASCII characters without blanks; the key is not shown here"
            )
        self.options, self.asked, self._cache, self._exact = options, 0, cache, exact
        self._length_field = options.length_field or LENGTH_FIELDS[0]
        self._temperature = not options.no_temperature
        # One event loop runs all requests, because a blocking read cannot enforce a deadline for a whole answer.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="endpoint", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        self._slots = asyncio.Semaphore(options.concurrency)
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "gzip"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=None,
            limits=httpx.Limits(max_connections=options.concurrency),
        )

    def ask_all(self, conversations: Sequence[Sequence[Message]], **request: Any) -> list[Reply]:
        """Like `ask_each`, but raise an error for a conversation without a reply and send no further requests.

        Raises:
          RunError: The endpoint refuses a request, is down, or does not return a reply.
        """
        return cast(list[Reply], self.ask_each(conversations, **request, tolerated=()))

    def ask_each(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        temperature: float,
        max_new_tokens: int,
        seeds: Sequence[int] | None = None,
        alternatives: int | None = None,
        more: Mapping[str, Any] | None = None,
        tolerated: type[NoReplyError] | tuple[()] = NoReplyError,
    ) -> list[Reply | NoReplyError]:
        """Return the reply to each conversation, or the error in its place; requests are concurrent.

        Args:
          conversations: Conversations to reply to; equal requests are sent once.
          temperature: Sampling temperature.
          max_new_tokens: Maximum number of tokens of a reply.
          seeds: One seed per conversation, which is sent to the endpoint.
          alternatives: Number of most probable tokens to request at each position (``top_logprobs``), if any.
          more: Further fields of each request, e.g. `top_p`.
          tolerated: Errors that do not stop other requests.

        Raises:
          RunError: The endpoint refuses the key, or does not have the model or address.
        """
        futures: dict[str, Future[Reply]] = {}
        stop = asyncio.Event()

        async def ask(body: Mapping[str, Any]) -> Reply:
            try:
                return await self._ask(body, stop)
            except RunError as error:
                if not isinstance(error, tolerated):
                    stop.set()
                raise

        def outcome(future: Future[Reply]) -> Reply | NoReplyError:
            try:
                return future.result()
            except tolerated as error:
                return error

        keys = []
        for number, messages in enumerate(conversations):
            body = {
                "model": self.options.model,
                "messages": [{"role": message.role, "content": message.content} for message in messages],
                "temperature": temperature,
                "max_tokens": max_new_tokens,
                **({} if seeds is None else {"seed": seeds[number]}),
                **({} if alternatives is None else {"logprobs": True, "top_logprobs": alternatives}),
                **(more or {}),
            }
            keys.append(json.dumps(body, sort_keys=True))
            if keys[-1] not in futures:
                futures[keys[-1]] = asyncio.run_coroutine_threadsafe(ask(body), self._loop)
        try:
            return [outcome(futures[key]) for key in keys]
        finally:
            for future in futures.values():
                future.cancel()

    def cost(self, prompt_tokens: int | None, completion_tokens: int | None) -> float | None:
        """Return the price of tokens in dollars; None if prices or counts are unknown."""
        prices = self.options.prices
        if prices is None or prompt_tokens is None or completion_tokens is None:
            return None
        return (prompt_tokens * prices[0] + completion_tokens * prices[1]) / 1e6

    async def _ask(self, body: Mapping[str, Any], stop: asyncio.Event) -> Reply:
        """Return the cached reply to a request, or a new one, which is cached; send nothing once ``stop`` is set."""
        request = json.dumps({"url": self.options.url, "body": body}, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(request.encode()).hexdigest()
        path = None if self._cache is None else self._cache / digest[:2] / f"{digest}.json"
        if path is not None and path.exists():
            known = read_object(path, error=RunError, hint="remove it, and it is asked again")
            return self._read(known, alternatives="logprobs" in body)
        async with self._slots:
            if stop.is_set():
                raise asyncio.CancelledError
            answer, tries = await self._tried(body)
            reply = replace(self._read(answer, alternatives="logprobs" in body), tries=tries)
            if path is not None:
                await asyncio.to_thread(write_file, path, json.dumps({**answer, TRIES: tries}).encode())
        return reply

    async def _tried(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """Return the answer of the endpoint and the number of tries."""
        options, wait, failure = self.options, self.options.backoff, ""
        for number in range(options.tries):
            if number:
                await asyncio.sleep(wait * (1 + random.random() / 4))
            self.asked += 1
            sent = self._sent(body)
            wait = min(options.backoff * 2**number, LONGEST_WAIT)
            try:
                async with asyncio.timeout(options.seconds):
                    answer, data = await self._post(sent)
            except TimeoutError:
                failure = f"no whole answer within {options.seconds:g} seconds"
                continue
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            status, said = answer.status_code, without_key(data.decode("utf-8", "replace"), options.key)
            if status in RETRIED or status >= 500:
                failure, wait = f"status {status}: {said}", retry_after(answer, wait)
                continue
            if status in (400, 422) and self._learns(said, body, sent):
                return await self._tried(body)
            if status != 200:
                hint = f"; set {KEY} to a key that it takes" if status in (401, 403) else ""
                kind = RunError if status in HOPELESS else NoReplyError
                raise kind(f"{options.url}: status {status}: {said}{hint}")
            try:
                contents = parse_json(data, where=options.url, error=RunError)
                self._read(contents)
                return contents, number + 1
            except RunError as error:
                failure = str(error)
        raise NoReplyError(f"{options.url}: no reply after {options.tries} tries; the last one: {failure}")

    def _learns(self, said: str, body: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
        """Adapt to a refused request; return True if it is now sent in a different form.

        Raises:
          RunError: The endpoint refuses a temperature that must be exact.
        """
        if LENGTH_FIELDS[1] in said and LENGTH_FIELDS[0] in sent and self.options.length_field is None:
            self._length_field = LENGTH_FIELDS[1]
        elif "temperature" in sent and _REFUSED_TEMPERATURE.search(said):
            if body["temperature"] != 1:  # such models always sample at 1
                refuses = (
                    f"{self.options.url}: {self.options.model} refuses temperature {body['temperature']:g}"
                )
                if self._exact:
                    raise RunError(f"{refuses}: expected --temperature 1, its own, found an answer {said}")
                if self._temperature:
                    problem = f"{refuses}: it replies at its own, and no two runs need agree"
                    warnings.warn(problem, PrbWarning, stacklevel=2)
            self._temperature = False
        return self._sent(body) != sent

    def _sent(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request in the form that the endpoint accepts."""
        sent = {name: value for name, value in body.items() if name not in (LENGTH_FIELDS[0], "temperature")}
        sent[self._length_field] = body[LENGTH_FIELDS[0]]
        return sent | ({"temperature": body["temperature"]} if self._temperature else {})

    async def _post(self, body: Mapping[str, Any]) -> tuple[httpx.Response, bytes]:
        """Return the answer to one try, and its body.

        Raises:
          httpx.HTTPError: The request failed.
          NoReplyError: The answer is larger than `LARGEST_ANSWER`.
        """
        url, data = f"{self.options.url.rstrip('/')}/chat/completions", bytearray()
        async with self._client.stream("POST", url, json=body) as answer:
            zipped = answer.headers.get("content-encoding", "").lower() == "gzip"
            unzip = zlib.decompressobj(wbits=31) if zipped else None
            async for chunk in answer.aiter_raw():
                try:
                    # bounded, because a few compressed bytes can expand to gigabytes
                    data += (
                        chunk if unzip is None else unzip.decompress(chunk, LARGEST_ANSWER + 1 - len(data))
                    )
                except zlib.error as error:
                    raise httpx.DecodingError(str(error)) from error
                if len(data) > LARGEST_ANSWER:
                    raise NoReplyError(
                        f"{self.options.url}: expected a reply, found an answer of more than {LARGEST_ANSWER:,} bytes"
                    )
        return answer, bytes(data)

    def _read(self, answer: Any, *, alternatives: bool = False) -> Reply:
        """Return the reply in an answer, with alternatives of its tokens if requested.

        Raises:
          RunError: The answer contains no reply.
        """
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        first: Any = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(message.get("content", 0), str | None):
            raise RunError(
                f"{self.options.url}: expected an answer with choices[0].message.content, found "
                f"{without_key(answer, self.options.key)}"
            )
        usage = answer.get("usage")
        usage = usage if isinstance(usage, Mapping) else {}

        def tokens(name: str) -> int | None:
            number = usage.get(name)
            return number if type(number) is int and number >= 0 else None

        told = None
        if alternatives:
            told = _alternatives(first.get("logprobs")) if message["content"] else []
            if told is None:
                raise RunError(
                    f"{self.options.url}: expected choices[0].logprobs.content with a token and its top_logprobs for "
                    f"each place, found {without_key(first.get('logprobs'), self.options.key)}: leave out "
                    "--top-logprobs, and the number is read from the reply"
                )
        finish, tries = first.get("finish_reason"), answer.get(TRIES, 1)
        return Reply(
            message["content"] or "",
            tokens("prompt_tokens"),
            tokens("completion_tokens"),
            told,
            finish=finish if isinstance(finish, str) else None,
            tries=tries if type(tries) is int else 1,
        )


def _alternatives(logprobs: Any) -> list[tuple[str, list[tuple[str, float]]]] | None:
    """Return the tokens of a reply, each with the most probable tokens there; None for an unexpected format."""
    try:
        return [
            (
                str(place["token"]),
                [(str(other["token"]), float(other["logprob"])) for other in place["top_logprobs"]],
            )
            for place in logprobs["content"]
        ]
    except (KeyError, TypeError, ValueError):
        return None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the event loop of an endpoint's thread until the endpoint is garbage collected."""
    try:
        loop.run_forever()
    finally:
        loop.close()
