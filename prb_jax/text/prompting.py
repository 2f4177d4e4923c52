"""The text after which a response begins: a conversation with the assistant's turn opened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prb_jax.data.comparison import Message
from prb_jax.errors import CheckpointError
from prb_jax.text.tokenizer import ChatTokenizer

_ANSWER = "An answer."


def prompt_texts(chat: ChatTokenizer, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """Return each conversation as text up to where the assistant's answer begins.

    The template is asked to open the assistant's turn. Where it does not know that request, the text is that of the
    conversation with an answer, up to this answer.

    Raises:
      RenderError: the template refuses a conversation; its ``conversation`` tells which.
      CheckpointError: an answer that the template does not write as it is.
    """
    opened = chat.render(conversations, generation_prompt=True)
    closed = chat.render(conversations)
    if any(text != other for text, other in zip(opened, closed, strict=True)):
        return opened
    answered = chat.render([[*messages, Message("assistant", _ANSWER)] for messages in conversations])
    places = [text.rfind(_ANSWER) for text in answered]
    if min(places, default=0) < 0:
        raise CheckpointError(
            f"{chat.name}: the chat template does not write the assistant's answer as it is, so nobody can tell where "
            "one begins; give another template with --chat-template FILE"
        )
    return [text[:place] for text, place in zip(answered, places, strict=True)]


def encode_prompts(chat: ChatTokenizer, conversations: Sequence[Sequence[Message]]) -> list[np.ndarray]:
    """Return the token ids of :func:`prompt_texts`, int32, each text in one tokenisation.

    Raises:
      CheckpointError: a prompt without a token, or with BOS twice; else as :func:`prompt_texts`.
    """
    encoded = chat.tokenize(prompt_texts(chat, conversations))
    for ids in encoded:
        chat.check_one_bos(ids)
        if not len(ids):
            raise CheckpointError(
                f"{chat.name}: the chat template gives a prompt without a token; expected BOS or a text"
            )
    return encoded
