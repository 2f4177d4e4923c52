"""Language models that reply to conversations in words: on this machine, or behind an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, DataError, RunError, quote
from prb_jax.generation.policy import Policy, load_opened_policy
from prb_jax.generation.prompts import fit_posts
from prb_jax.generation.rules import SampleOptions
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_language_model
from prb_jax.remote.endpoint import Endpoint, Reply
from prb_jax.remote.options import EndpointOptions
from prb_jax.scoring.reader import IdsTooLongError
from prb_jax.text.prompting import encode_prompts
from prb_jax.text.tokenizer import RenderError


class ChatModel(Protocol):
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
        """Return the most probable reply to each conversation: that of temperature 0.

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
class LocalChat:
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
        drawn = self.policy.sample(prompts, temperature=0.0, max_new_tokens=max_new_tokens)
        return [
            Reply(sample.text, len(sample.prompt_token_ids), len(sample.token_ids)) for (sample,) in drawn
        ]

    def too_long(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> str | None:
        limit = self.policy.limit(SampleOptions(temperature=0.0, max_new_tokens=max_new_tokens))
        longest = max(len(ids) for ids in encode_prompts(self.policy.tokenizer, conversations))
        if longest <= limit:
            return None
        return f"{longest:,} tokens without any post, more than the {limit:,} beside which a reply fits"


@dataclass(frozen=True)
class EndpointChat:
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


def open_chat(
    model: str | Path | None,
    *,
    endpoint: EndpointOptions | None,
    loading: LoadOptions,
    cache: Path | None,
    verb: str,
) -> ChatModel:
    """Return a model on this machine, or one behind an endpoint whose replies are kept in ``cache``, if given.

    Raises:
      RunError: both or neither of model and endpoint; names the verb.
      CheckpointError: the model cannot be loaded, or nothing could end a reply.
    """
    if endpoint is not None and model is None:
        return EndpointChat(Endpoint(endpoint, cache=cache))
    if endpoint is not None or model is None:
        raise RunError(f"{verb}: expected either a MODEL, or --endpoint URL and --model NAME")
    policy = load_opened_policy(open_language_model(model, loading))
    if not policy.stop_ids:
        raise CheckpointError(
            f"{policy.name}: no stop token, and no reply would end: expected eos_token_id in generation_config.json, "
            "config.json or the tokenizer's files"
        )
    return LocalChat(policy)


def fit_conversations(
    chat: ChatModel,
    comparisons: Sequence[Comparison],
    ask: Callable[[Comparison, int], list[tuple[Message, ...]]],
    *,
    posts: int,
    max_new_tokens: int,
) -> tuple[list[tuple[Message, ...]], list[int]]:
    """Return conversations about comparisons that leave room for a reply, and how many posts of each do not fit.

    Args:
      chat: the model that will reply.
      comparisons: for their profiles, and for messages.
      ask: gives the conversations about a comparison with so many posts.
      posts: at most.
      max_new_tokens: of a reply.

    Raises:
      DataError: there is no room without any post, or the chat template refuses a conversation.
    """
    conversations, dropped = [], []
    for comparison in comparisons:

        def read(count: int, comparison: Comparison = comparison) -> list[tuple[Message, ...]]:
            name, asked = f"comparison {quote(comparison.id)}", ask(comparison, count)
            try:
                reason = chat.too_long(asked, max_new_tokens=max_new_tokens)
            except RenderError as error:
                raise DataError(f"{name}: {error.reason}") from error
            if reason is not None:
                raise IdsTooLongError(f"{name}: {reason}")
            return asked

        most = min(posts, len(comparison.profile))
        asked, shown = fit_posts(read, most)
        conversations += asked
        dropped.append(most - shown)
    return conversations, dropped
