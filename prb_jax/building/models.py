"""The models of a build, on this machine or behind an endpoint: the generator, and the judge."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from prb_jax.building.settings import ChatModelSettings
from prb_jax.data.comparison import Message
from prb_jax.errors import DataError
from prb_jax.generation.policy import Policy
from prb_jax.judges.chat import ChatModel, EndpointChat, LocalChat
from prb_jax.remote.endpoint import Endpoint, NoReplyError, Reply
from prb_jax.remote.options import KEY, EndpointOptions

Conversation = Sequence[Message]


@dataclass(frozen=True)
class Ask:
    """One text that is wanted.

    Attributes:
      messages: the conversation that it continues.
      seed: of its draw.
    """

    messages: Conversation
    seed: int


class Writer(Protocol):
    """A model that writes texts by seeds: the same asks in the same order always give the same replies."""

    def identity(self) -> Mapping[str, Any]:
        """Return everything that decides the texts, JSON-ready."""
        ...

    def write(
        self, asks: Sequence[Ask], *, temperature: float, max_new_tokens: int
    ) -> list[Reply | NoReplyError]:
        """Return what comes of each ask.

        Raises:
          PrbError: nothing further can be asked of this model.
        """
        ...


@dataclass(frozen=True)
class EndpointWriter:
    """A model behind an endpoint; it is told the seed of every ask."""

    endpoint: Endpoint

    def identity(self) -> Mapping[str, Any]:
        options = self.endpoint.options
        return {"endpoint": options.url, "name": options.model}

    def write(
        self, asks: Sequence[Ask], *, temperature: float, max_new_tokens: int
    ) -> list[Reply | NoReplyError]:
        return self.endpoint.ask_each(
            [ask.messages for ask in asks],
            seeds=[ask.seed for ask in asks],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )


@dataclass(frozen=True)
class PolicyWriter:
    """A model on this machine. Asks that follow each other with the same conversation share its key-value cache."""

    policy: Policy

    def identity(self) -> Mapping[str, Any]:
        return self.policy.identity()

    def write(
        self, asks: Sequence[Ask], *, temperature: float, max_new_tokens: int
    ) -> list[Reply | NoReplyError]:
        groups = [list(group) for _, group in groupby(asks, key=lambda ask: tuple(ask.messages))]
        if not groups:
            return []
        seeds = hashlib.sha256(repr([ask.seed for ask in asks]).encode()).digest()
        prompts = [[asdict(message) for message in group[0].messages] for group in groups]
        try:
            found = self.policy.sample(
                prompts,
                n=max(map(len, groups)),
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=int.from_bytes(seeds[:4], "big") >> 1,
            )
        except DataError as error:
            raise DataError(
                f"the generator cannot take what it is told: {error}; lower writing.profile_posts or "
                "writing.max_new_tokens"
            ) from error
        return [
            Reply(
                one.text,
                len(one.prompt_token_ids),
                len(one.token_ids),
                finish="length" if one.finish == "length" else "stop",
            )
            for group, samples in zip(groups, found, strict=True)
            for one in samples[: len(group)]
        ]


def open_writer(settings: ChatModelSettings, *, cache: Path) -> EndpointWriter | PolicyWriter:
    """Return the generator that settings name; errors as of :func:`prb_jax.load_policy`."""
    if settings.endpoint is not None:
        return EndpointWriter(Endpoint(endpoint_options(settings), cache=cache))
    return PolicyWriter(_policy(settings))


def open_judge(settings: ChatModelSettings, *, cache: Path) -> ChatModel:
    """Return the judge that settings name; errors as of :func:`prb_jax.load_policy`."""
    if settings.endpoint is not None:
        return EndpointChat(Endpoint(endpoint_options(settings), cache=cache))
    return LocalChat(_policy(settings))


def _policy(settings: ChatModelSettings) -> Policy:
    from prb_jax.generation.policy import load_policy

    assert settings.model is not None
    return load_policy(
        settings.model,
        mesh=settings.mesh,
        dtype=settings.dtype,
        revision=settings.revision,
        tokenizer=settings.tokenizer,
        chat_template=settings.chat_template,
    )


def endpoint_options(settings: ChatModelSettings) -> EndpointOptions:
    """Return how an endpoint is asked, with the key of the environment."""
    assert settings.endpoint is not None
    assert settings.name is not None
    return EndpointOptions(
        url=settings.endpoint,
        model=settings.name,
        key=os.environ.get(KEY) or None,
        concurrency=settings.concurrency,
        tries=settings.tries,
        seconds=settings.seconds,
        backoff=settings.backoff,
        prices=settings.prices,
    )


def cost(settings: ChatModelSettings, prompt_tokens: int | None, reply_tokens: int | None) -> float | None:
    """Return the price of tokens in dollars; None where prices or tokens are not known."""
    if settings.prices is None or prompt_tokens is None or reply_tokens is None:
        return None
    return (prompt_tokens * settings.prices[0] + reply_tokens * settings.prices[1]) / 1e6
