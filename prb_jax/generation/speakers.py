"""Language models that reply to conversations in words: on this machine, or behind an endpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, DataError, quote
from prb_jax.generation.endpoint import Endpoint, Reply
from prb_jax.generation.load import load_opened_policy
from prb_jax.generation.policy import Policy
from prb_jax.generation.settings import SampleOptions
from prb_jax.readouts.language_model import open_language_model
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.prompting import encode_prompts
from prb_jax.text.tokenizer import RenderError


class Speaker(Protocol):
    """A model that replies to conversations, always in the same way."""

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides its replies, JSON-ready."""
        ...

    def replies(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_new_tokens: int,
        alternatives: int | None = None,
    ) -> list[Reply]:
        """Return the most probable reply to each conversation, or what the model makes of temperature 0.

        Args:
          conversations: to reply to.
          max_new_tokens: of a reply.
          alternatives: most probable tokens that are told of each place, if any.
        """
        ...

    def too_long(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> str | None:
        """Return how a conversation leaves no room for a reply; None where each one does, or nobody can tell."""
        ...


@dataclass(frozen=True)
class PolicySpeaker:
    """A language model on this machine."""

    policy: Policy

    def identity(self) -> Mapping[str, Any]:
        return self.policy.identity()

    def replies(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_new_tokens: int,
        alternatives: int | None = None,
    ) -> list[Reply]:
        assert alternatives is None  # a model on this machine is read at its logits
        prompts = [[asdict(message) for message in messages] for messages in conversations]
        found = self.policy.sample(prompts, temperature=0.0, max_new_tokens=max_new_tokens)
        return [Reply(one.text, len(one.prompt_token_ids), len(one.token_ids)) for (one,) in found]

    def too_long(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> str | None:
        limit = self.policy.limit(SampleOptions(temperature=0.0, max_new_tokens=max_new_tokens))
        longest = max(len(ids) for ids in encode_prompts(self.policy.tokenizer, conversations))
        if longest <= limit:
            return None
        return f"{longest:,} tokens without any post, more than the {limit:,} beside which a reply fits"


@dataclass(frozen=True)
class EndpointSpeaker:
    """A model behind an endpoint."""

    endpoint: Endpoint

    def identity(self) -> Mapping[str, Any]:
        options = self.endpoint.options
        return {"name": options.model, "endpoint": options.url, "model": options.model}

    def replies(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_new_tokens: int,
        alternatives: int | None = None,
    ) -> list[Reply]:
        return self.endpoint.ask_all(
            conversations, temperature=0.0, max_new_tokens=max_new_tokens, alternatives=alternatives
        )

    def too_long(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> str | None:
        return None


def local_speaker(model: str | Path, loading: LoadOptions) -> PolicySpeaker:
    """Load a causal language model that replies.

    Raises:
      CheckpointError: it cannot be loaded, or nothing could end a reply.
    """
    policy = load_opened_policy(open_language_model(model, loading))
    if not policy.stop_ids:
        raise CheckpointError(
            f"{policy.name}: no stop token, and no reply would end: expected eos_token_id in generation_config.json, "
            "config.json or the tokenizer's files"
        )
    return PolicySpeaker(policy)


def fitted(
    speaker: Speaker,
    comparison: Comparison,
    asked: Callable[[int], list[tuple[Message, ...]]],
    *,
    posts: int,
    max_new_tokens: int,
) -> tuple[list[tuple[Message, ...]], int]:
    """Return conversations about a comparison with as many posts as leave room for a reply, and how many do not fit.

    Args:
      speaker: that will reply.
      comparison: for its profile, and for messages.
      asked: gives the conversations with so many posts.
      posts: at most.
      max_new_tokens: of a reply.

    Raises:
      DataError: there is no room without any post, or the chat template refuses a conversation.
    """
    shown, name = min(posts, len(comparison.profile)), f"comparison {quote(comparison.id)}"
    for tried in range(shown, -1, -1):
        conversations = asked(tried)
        try:
            reason = speaker.too_long(conversations, max_new_tokens=max_new_tokens)
        except RenderError as error:
            raise DataError(f"{name}: {error.reason}") from error
        if reason is None:
            return conversations, shown - tried
        if not tried:
            raise DataError(f"{name}: {reason}")
    raise AssertionError


def all_fitted(
    speaker: Speaker,
    comparisons: Sequence[Comparison],
    asked: Callable[[Comparison, int], list[tuple[Message, ...]]],
    *,
    posts: int,
    max_new_tokens: int,
) -> tuple[list[tuple[Message, ...]], list[int]]:
    """Return the conversations about all comparisons, one after the other, and how many posts of each do not fit.

    Arguments and errors as of :func:`fitted`; `asked` is given the comparison too.
    """
    conversations, dropped = [], []
    for each in comparisons:
        own, lost = fitted(
            speaker, each, functools.partial(asked, each), posts=posts, max_new_tokens=max_new_tokens
        )
        conversations += own
        dropped.append(lost)
    return conversations, dropped
