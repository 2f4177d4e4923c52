"""Samples of a language model behind an endpoint, for `prb sample --endpoint`: texts without token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError
from prb_jax.generation.rules import SampleOptions
from prb_jax.remote.endpoint import Endpoint, Reply
from prb_jax.remote.options import EndpointOptions
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.visible import visible

_AHEAD = 4  # times as many samples as are asked for at a time are written together


@dataclass(frozen=True)
class EndpointSampler:
    """Draws samples from an endpoint, each by a request of its own with a seed of its own.

    Attributes:
      endpoint: that is asked.
      options: how samples are drawn.
      profile_posts: at most this many posts of each profile are shown; the endpoint refuses what is too long.
    """

    endpoint: Endpoint
    options: SampleOptions
    profile_posts: int

    def identity(self) -> dict[str, Any]:
        """Return the name, and what decides the samples as far as it can be known."""
        asked = self.endpoint.options
        unknown = "revision, chat template, dtype and context of the model, which the server alone knows"
        return {"name": asked.model, "endpoint": asked.url, "model": asked.model, "unknown": unknown}

    def draw(
        self, comparisons: Sequence[Comparison], known: Mapping[Any, Any]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield rows of the samples that are not known, some at a time.

        Raises:
          RunError: the endpoint refuses, is down, or answers with something else than a text.
        """
        missing = [
            (comparison, number)
            for comparison in comparisons
            for number in range(self.options.n)
            if (comparison.id, number) not in known
        ]
        size = _AHEAD * self.endpoint.options.concurrency
        for start in range(0, len(missing), size):
            part = missing[start : start + size]
            replies = self.endpoint.ask_all(
                [self._prompt(comparison) for comparison, _ in part],
                temperature=self.options.temperature,
                max_new_tokens=self.options.max_new_tokens,
                seeds=[self._seed(comparison, number) for comparison, number in part],
                more=self._fields(),
            )
            yield [
                _row(comparison, number, reply)
                for (comparison, number), reply in zip(part, replies, strict=True)
            ]

    def _prompt(self, comparison: Comparison) -> Any:
        shown = visible(comparison, profile_posts=self.profile_posts, protocol=TextProtocol.DEFAULT)
        return shown.prefix_messages

    def _seed(self, comparison: Comparison, number: int) -> int:
        told = f"{self.options.seed}/{number}/{comparison.id}"
        return int.from_bytes(sha256(told.encode()).digest()[:4], "big") >> 1

    def _fields(self) -> dict[str, Any]:
        """The rules that are not as they are by default, as vLLM and SGLang call them."""
        options, plain = self.options, SampleOptions()
        rules = ("top_p", "top_k", "min_p", "repetition_penalty")
        given = {
            name: getattr(options, name) for name in rules if getattr(options, name) != getattr(plain, name)
        }
        given |= {"stop": list(options.stop)} if options.stop else {}
        return given | ({} if options.stop_ids is None else {"stop_token_ids": list(options.stop_ids)})


def open_sampler(options: EndpointOptions, sampling: SampleOptions, *, profile_posts: int) -> EndpointSampler:
    """Return what draws from an endpoint.

    Raises:
      RunError: a temperature that would not be sent.
    """
    if options.no_temperature and sampling.temperature != 1:
        raise RunError(
            f"--no-temperature: samples are drawn at temperature {sampling.temperature:g}: expected --temperature 1"
        )
    return EndpointSampler(Endpoint(options, cache=None, exact=True), sampling, profile_posts)


def _row(comparison: Comparison, number: int, reply: Reply) -> dict[str, Any]:
    return {
        "id": comparison.id,
        "sample": number,
        "prompt_token_ids": None,
        "token_ids": None,
        "text": reply.text,
        "logprob": None,
        "sampled_logprob": None,
        "finish": reply.finish or "unknown",
        "prompt_tokens": reply.prompt_tokens,
        "tokens": reply.completion_tokens,
    }
