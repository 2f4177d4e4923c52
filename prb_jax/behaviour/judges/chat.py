"""Language models that answer conversations: in words, on this machine or behind an endpoint, or by logits.

A model that is read at its logits generates nothing: the conversations about a comparison form one tree, and each is
read at the position where its reply would begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.behaviour.generation.policy import Policy, Sample, open_policy
from prb_jax.behaviour.generation.prompts import fit_posts
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.judges.replies import has_thoughts, opened_thoughts
from prb_jax.behaviour.judges.scorer import Answer, Conversation
from prb_jax.errors import CheckpointError, DataError, RunError, quote
from prb_jax.models.head import ALL_VALUES
from prb_jax.models.readouts.language_model import open_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import open_model
from prb_jax.models.vocabulary_heads import Vocabulary
from prb_jax.records.comparison import Comparison, Message
from prb_jax.scoring.batching import stream_scores
from prb_jax.scoring.remote.endpoint import Endpoint, Reply
from prb_jax.scoring.remote.options import EndpointOptions
from prb_jax.scoring.reward_model import RewardModel, load_reward_model
from prb_jax.scoring.token_ids import IdsTooLongError, encode_ids
from prb_jax.text.prompts import encode_prompts, prompt_texts
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import Tree

Ask = Callable[[int], Sequence[Conversation]]
"""Returns the conversations about a comparison, given the number of profile posts to include."""


ChatModel = Policy | Endpoint
"""A language model that replies to conversations, on this machine or behind an endpoint."""


def open_chat(
    model: str | Path | None,
    *,
    endpoint: EndpointOptions | None,
    loading: LoadOptions,
    cache: Path | None,
    verb: str,
    exact: bool = False,
) -> ChatModel:
    """Return a model on this machine, or one behind an endpoint whose replies are kept in ``cache``, if given.

    An endpoint that rejects a temperature uses its own, with a warning; with ``exact`` this is an error.

    Raises:
      RunError: both or neither of model and endpoint are given; names the verb.
      CheckpointError: the model cannot be loaded, or nothing could end a reply.
    """
    if endpoint is not None and model is None:
        return Endpoint(endpoint, cache=cache, exact=exact)
    if endpoint is not None or model is None:
        raise RunError(f"{verb}: expected either a MODEL, or --endpoint URL and --model NAME")
    policy = open_policy(model, loading)
    if not policy.stop_ids:
        raise CheckpointError(
            f"{policy.name}: no stop token, and no reply would end: expected eos_token_id in generation_config.json, "
            "config.json or the tokenizer's files"
        )
    return policy


@dataclass(frozen=True)
class Drawing:
    """How replies above temperature 0 are drawn: several votes for each conversation, each with a seed."""

    temperature: float
    votes: int = 1
    seed: int = 0

    def seeds(self, name: str, conversations: Sequence[Conversation]) -> list[int]:
        """Return the seed of each conversation about a comparison; it depends only on `seed`, name and texts.

        For vote k, an endpoint uses the seed plus k (modulo 2**31), and a model on this machine draws sample k.
        """
        texts = [
            f"{self.seed}/{name}/{[(m.role, m.content) for m in messages]}" for messages in conversations
        ]
        return [int.from_bytes(sha256(text.encode()).digest()[:4], "big") >> 1 for text in texts]


@dataclass(frozen=True)
class InWords:
    """A model that answers each conversation in words: with its most probable reply, or with several drawn replies."""

    model: ChatModel
    max_new_tokens: int  # maximum tokens of a reply
    alternatives: int | None = None  # most probable tokens from an endpoint at each position
    drawing: Drawing | None = None  # None for the most probable reply, at temperature 0
    # values for the chat template of the model at an endpoint; a model on this machine has them in its template
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    limited: bool = False  # whether a user chose the maximum tokens of a reply

    @property
    def votes(self) -> int:
        """Number of replies to each conversation."""
        return 1 if self.drawing is None else self.drawing.votes

    def identity(self) -> Mapping[str, Any]:
        """Everything that determines the replies, JSON-ready."""
        if isinstance(self.model, Policy):
            identity = self.model.identity()
        else:
            options = self.model.options
            identity = {"name": options.model, "endpoint": options.url, "model": options.model}
        identity |= {"max_new_tokens": self.max_new_tokens} if self.limited else {}
        identity |= {"drawing": asdict(self.drawing)} if self.drawing else {}
        variables = dict(self.template_variables)
        return identity | ({"chat_template_kwargs": variables} if variables else {})

    def replies(
        self, conversations: Sequence[Conversation], seeds: Sequence[int] | None = None
    ) -> list[Reply]:
        """Return the replies to each conversation, in order: as many as there are votes.

        Args:
          conversations: Conversations to reply to.
          seeds: One seed for each conversation if replies are drawn, see `Drawing.seeds`.
        """
        votes, drawing = self.votes, self.drawing
        assert (drawing is None) == (seeds is None)
        limits: dict[str, Any] = {
            "temperature": 0.0 if drawing is None else drawing.temperature,
            "max_new_tokens": self.max_new_tokens,
        }
        if isinstance(self.model, Endpoint):
            asked = [messages for messages in conversations for _ in range(votes)]
            told = None if seeds is None else [(seed + k) % 2**31 for seed in seeds for k in range(votes)]
            variables = dict(self.template_variables)
            more = {"chat_template_kwargs": variables} if variables else None
            return self.model.ask_all(asked, **limits, alternatives=self.alternatives, seeds=told, more=more)
        assert self.alternatives is None  # a model on this machine is read at its logits
        if drawing is not None:
            limits |= {"n": votes, "seed": drawing.seed, "numbers": seeds}
        drawn = self.model.sample(encode_prompts(self.model.tokenizer, conversations), **limits)
        return [
            Reply(
                _thoughts_of_prompt(self.model, one) + _text(self.model, one),
                len(one.prompt_token_ids),
                len(one.token_ids),
                finish=one.finish,
            )
            for samples in drawn
            for one in samples
        ]

    def answers(self, comparisons: Sequence[Comparison], asks: Sequence[Ask], *, posts: int) -> list[Answer]:
        """Return the answer about each comparison, with as many posts of its profile as fit, at most ``posts``.

        Raises:
          DataError: conversations are too long even without posts, or the chat template rejects them; names the
            comparison.
          RunError: an endpoint rejects a request, is down, or returns something malformed.
        """

        def read(name: str, ask: Ask, count: int) -> Sequence[Conversation]:
            asked = ask(count)
            if isinstance(self.model, Policy):  # the length at an endpoint is unknown
                limit = self.model.limit(SampleOptions(max_new_tokens=self.max_new_tokens))
                longest = max(len(ids) for ids in encode_prompts(self.model.tokenizer, asked))
                if longest > limit:
                    raise IdsTooLongError(
                        f"comparison {quote(name)}: {longest:,} tokens even without posts; expected at most "
                        f"{limit:,}, to leave room for a reply"
                    )
            return asked

        fitting = [
            fit_posts(comparison, posts, partial(read, comparison.id, ask))
            for comparison, ask in zip(comparisons, asks, strict=True)
        ]
        seeds = [
            self.drawing.seeds(comparison.id, asked) if self.drawing else []
            for comparison, (asked, _) in zip(comparisons, fitting, strict=True)
        ]
        every = iter(
            self.replies(
                [conversation for asked, _ in fitting for conversation in asked],
                [seed for told in seeds for seed in told] if self.drawing else None,
            )
        )
        answers: list[Answer] = []
        for (asked, dropped), told in zip(fitting, seeds, strict=True):
            replies = [next(every) for _ in range(len(asked) * self.votes)]
            tokens = sum((reply.prompt_tokens or 0) + (reply.completion_tokens or 0) for reply in replies)
            answers.append(Answer(tokens, dropped, replies=replies, seeds=told))
        return answers


def _thoughts_of_prompt(model: Policy, sample: Sample) -> str:
    """Return the mark with which the prompt opens the model's thoughts. Without it, unclosed thoughts would look like a
    reply."""
    return opened_thoughts(model.decode(sample.prompt_token_ids[-16:], special_tokens=True))


def _text(model: Policy, sample: Sample) -> str:
    """Return the text of a sample, with its special tokens if these mark thoughts."""
    whole = model.decode(sample.token_ids, special_tokens=True)
    return whole if has_thoughts(whole) else sample.text


@dataclass(frozen=True)
class ByLogits:
    """A model that is read where its replies would begin; it has the same `answers` interface as `InWords`."""

    # returns two values: the read-out of some tokens, and the probability of these among all tokens
    model: RewardModel
    max_length: int | None = None  # longest conversation in tokens; default: the model's own limit

    def identity(self) -> Mapping[str, Any]:
        return self.model.identity()

    def answers(self, comparisons: Sequence[Comparison], asks: Sequence[Ask], *, posts: int) -> list[Answer]:
        reader = self.model.reader
        chat = cast(ChatTokenizer, reader.tokenizer)
        view = reader.view(ViewOptions(profile_posts=0, max_length=self.max_length))

        def read(name: str, ask: Ask, count: int) -> Tree:
            ids = encode_prompts(chat, ask(count))
            return encode_ids(reader, ids, view=view, name=f"comparison {quote(name)}")

        trees = [
            fit_posts(comparison, posts, partial(read, comparison.id, ask))
            for comparison, ask in zip(comparisons, asks, strict=True)
        ]
        values: list[np.ndarray] = [np.zeros(0)] * len(trees)
        for batch in stream_scores(
            cast(Sequence[Comparison], [tree for tree, _ in trees]),
            encode=lambda part: list(cast(Sequence[Tree], part)),
            dispatch=self.model.run,
            options=self.model.batch_options(),
            divide=False,
        ):
            for index, row in zip(batch.indices, batch.scores, strict=True):
                values[index] = row
        for comparison, row in zip(comparisons, values, strict=True):
            if not np.isfinite(row).all():
                raise DataError(
                    f"comparison {quote(comparison.id)}: the judge's values are {row[:, 0].tolist()}, with the "
                    f"probabilities {row[:, 1].tolist()} of their tokens"
                )
        return [
            Answer(tree.tokens, dropped, values=row[:, 0].tolist(), masses=row[:, 1].tolist())
            for (tree, dropped), row in zip(trees, values, strict=True)
        ]


def load_by_logits(
    model: str | Path,
    options: LoadOptions,
    texts: Sequence[str],
    *,
    readout: Callable[[Mapping[str, int]], str],
    instead: str,
    max_length: int | None,
) -> ByLogits:
    """Load a causal language model that is read at the logits of some texts.

    Args:
      texts: Texts, each a single token at the start of a reply.
      readout: Returns the read-out, given the token ids.
      instead: Advice for users if a text is not a single token.
      max_length: Longest conversation in tokens.

    Raises:
      CheckpointError: the model is not a causal language model, cannot be loaded, or a text is not a single token.
    """
    chat = open_language_model(model, options).chat()
    (prompt,) = prompt_texts(chat, [(Message("user", "A or B?"),)])
    before, *after = chat.tokenize([prompt, *(prompt + text for text in texts)])
    tokens: dict[str, int] = {}
    for text, ids in zip(texts, after, strict=True):
        if len(ids) != len(before) + 1 or not np.array_equal(ids[:-1], before):
            raise CheckpointError(
                f"{model}: the tokenizer has no single token for {text} at the start of a reply: {instead}"
            )
        tokens[text] = int(ids[-1])
    opened = open_model(model, replace(options, readout=readout(tokens)))
    config = opened.decoder.config
    config = replace(config, head=replace(cast(Vocabulary, config.head), with_mass=True))
    body = replace(opened.decoder, config=config)
    return ByLogits(load_reward_model(replace(opened, body=body, labels=ALL_VALUES)), max_length)
