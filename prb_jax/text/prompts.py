"""Texts and token ids of prompts, for models that continue them, and comparisons of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prb_jax.errors import CheckpointError, quote
from prb_jax.records.conversation import Message
from prb_jax.text.tokenizer import ANSWER, ChatTokenizer


def prompt_texts(chat: ChatTokenizer, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """Return the text of each conversation up to the start of the assistant's answer.

    The template is asked to open the assistant's turn. If it ignores this request, a conversation with an answer is
    rendered and cut before the answer.

    Raises:
      RenderError: The template refuses a conversation; ``conversation`` of the error is its index.
      CheckpointError: The template changes the text of an answer.
    """
    opened = chat.render(conversations, generation_prompt=True)
    closed = chat.render(conversations)
    if any(text != other for text, other in zip(opened, closed, strict=True)):
        return opened
    answered = chat.render([[*messages, Message("assistant", ANSWER)] for messages in conversations])
    places = [text.rfind(ANSWER) for text in answered]
    if min(places, default=0) < 0:
        raise CheckpointError(
            f"{chat.name}: the chat template does not write the assistant's answer as it is, so it is unknown where "
            "one begins; give another template with --chat-template FILE"
        )
    return [text[:place] for text, place in zip(answered, places, strict=True)]


def encode_prompts(chat: ChatTokenizer, conversations: Sequence[Sequence[Message]]) -> list[np.ndarray]:
    """Return the token ids of :func:`prompt_texts`, int32, each text in one tokenisation.

    Raises:
      RenderError: Errors of :func:`prompt_texts`.
      CheckpointError: Errors of :func:`prompt_texts`; or a prompt is empty or has BOS twice.
    """
    encoded = chat.tokenize(prompt_texts(chat, conversations))
    for ids in encoded:
        chat.check_ids(ids)
    return encoded


def why_other_tokenizer(policy: ChatTokenizer, reward: ChatTokenizer) -> str | None:
    """Return a sentence on the first difference between two tokenizers' vocabularies; None if they are equal."""
    ours, theirs = policy.tokenizer.get_vocab(), reward.tokenizer.get_vocab()
    if ours == theirs:
        return None
    token = min(
        (token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, 1 << 40), token),
    )
    return (
        f"its tokenizer is another one than the policy's ({policy.name}): token {quote(token)} is {theirs.get(token)}, "
        f"expected {ours.get(token)}"
    )
