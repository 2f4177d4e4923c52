"""Generator and judge of a build, on this machine or behind an endpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.judges.chat import InWords
from prb_jax.behaviour.judges.pairs import LETTER_TOKENS
from prb_jax.building.settings import ChatModelSettings
from prb_jax.errors import DataError
from prb_jax.records.comparison import Message
from prb_jax.scoring.remote.endpoint import Endpoint, NoReplyError, Reply
from prb_jax.scoring.remote.options import KEY, EndpointOptions

Conversation = Sequence[Message]


@dataclass(frozen=True)
class EndpointWriter:
    """A model behind an endpoint; every request includes the seed of its text."""

    endpoint: Endpoint

    def identity(self) -> Mapping[str, Any]:
        """Return everything that decides the texts, JSON-ready."""
        options = self.endpoint.options
        return {"endpoint": options.url, "name": options.model}

    def write(self, conversations: Sequence[Conversation], **drawing: Any) -> list[Reply | NoReplyError]:
        """Return the reply to each conversation; raise PrbError if the model cannot answer further requests."""
        return self.endpoint.ask_each(conversations, **drawing)


@dataclass(frozen=True)
class PolicyWriter:
    """A model on this machine. Equal consecutive conversations share their key-value cache."""

    policy: Policy

    def identity(self) -> Mapping[str, Any]:
        """Return everything that decides the texts, JSON-ready."""
        return self.policy.identity()

    def write(
        self, conversations: Sequence[Conversation], *, seeds: Sequence[int], **drawing: Any
    ) -> list[Reply | NoReplyError]:
        """Return the reply to each conversation."""
        groups = [(messages, len(list(same))) for messages, same in groupby(map(tuple, conversations))]
        seed = hashlib.sha256(repr(list(seeds)).encode()).digest()
        try:
            drawn = self.policy.sample(
                [[message.as_dict() for message in messages] for messages, _ in groups],
                n=max(count for _, count in groups),
                seed=int.from_bytes(seed[:4], "big") >> 1,
                **drawing,
            )
        except DataError as error:
            raise DataError(
                f"the generator cannot process its prompt: {error}; lower writing.profile_posts or "
                "writing.max_new_tokens"
            ) from error
        texts = [text for (_, count), samples in zip(groups, drawn, strict=True) for text in samples[:count]]
        return [
            Reply(
                text.text,
                len(text.prompt_token_ids),
                len(text.token_ids),
                finish="length" if text.finish == "length" else "stop",
            )
            for text in texts
        ]


Writer = EndpointWriter | PolicyWriter
"""A model that writes texts from seeds: the same conversations in the same order always give the same replies."""


def open_writer(settings: ChatModelSettings, *, cache: Path) -> Writer:
    """Return the generator of these settings; for errors see :func:`prb_jax.load_policy`."""
    model = _open(settings, cache)
    return EndpointWriter(model) if isinstance(model, Endpoint) else PolicyWriter(model)


def open_judge(settings: ChatModelSettings, *, cache: Path) -> InWords:
    """Return the judge of these settings; for errors see :func:`prb_jax.load_policy`."""
    return InWords(_open(settings, cache), LETTER_TOKENS)


def _open(settings: ChatModelSettings, cache: Path) -> Endpoint | Policy:
    """Return the endpoint of these settings, with the key from the environment, or the model on this machine."""
    if settings.endpoint is None:
        from prb_jax.behaviour.generation.policy import load_policy

        assert settings.model is not None
        names = ("mesh", "dtype", "revision", "tokenizer", "chat_template")
        return load_policy(settings.model, **{name: getattr(settings, name) for name in names})
    assert settings.name is not None
    names = ("concurrency", "tries", "seconds", "backoff", "prices")
    asked: dict[str, Any] = {name: getattr(settings, name) for name in names}
    key = os.environ.get(KEY) or None
    return Endpoint(
        EndpointOptions(url=settings.endpoint, model=settings.name, key=key, **asked), cache=cache
    )
