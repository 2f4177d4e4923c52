"""Prompts and responses: texts, or lists of messages that become a prompt and K responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from prb_jax.records import fields
from prb_jax.records.message import Message, Messages
from prb_jax.seams import get

RENDERED: Final = "rendered"
"""Role of the single message of an already rendered prompt: the prompt and its responses are used unchanged."""


class Turns(str):
    """A response of several messages, or of one message with more than a text.

    As a string it is the whole conversation in plain text, for readers without a chat template. It never equals a plain
    string.

    Attributes:
      messages: Messages for a chat template.
    """

    messages: Messages

    def __new__(cls, messages: Messages) -> Turns:
        alone = len(messages) == 1 and messages[0].role == "assistant"
        self = super().__new__(cls, messages[0].content if alone else transcript(messages))
        self.messages = messages
        return self

    def __getnewargs__(self) -> tuple[Messages]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.messages,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turns) and self.messages == other.messages

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.messages)


def turns_of(response: str) -> Messages:
    """Return the messages of a response."""
    return response.messages if isinstance(response, Turns) else (Message("assistant", response),)


def transcript(messages: Sequence[Message]) -> str:
    """Return a conversation in plain text, with its tools: for readers without a chat template."""
    before = [f"Tools: {messages[0].context}"] if messages and messages[0].context else []
    return "\n\n".join([*before, *(f"{turn.role.capitalize()}: {turn.content}" for turn in messages)])


def with_context(messages: Messages, context: str) -> Messages:
    """Return the conversation with this context on its first message."""
    return (replace(messages[0], context=context), *messages[1:]) if messages else messages


def is_rendered(messages: Sequence[Message]) -> bool:
    """Return True if a conversation begins with already rendered text."""
    return bool(messages) and messages[0].role == RENDERED


def read_conversation(
    question: object, prompt: object, responses: Sequence[tuple[str, object]], *, where: str, found: str = ""
) -> tuple[Messages, tuple[str, ...]]:
    """Return the prompt and the K responses of a record.

    A response is a text or a conversation. The prompt is the common start of all conversations, up to a message of the
    user or of a tool; the rest of each conversation is its response. A prompt given in addition to conversations must
    be a part of them, or precede them. A prompt can end with the beginning of the answer (a prefill), which texts
    continue.

    Args:
      question, prompt: Fields of the record: a text, a list of messages, or None.
      responses: K pairs of a field's name and its value.
      where: Start of error messages.
      found: End of messages about a missing field.

    Raises:
      DataError: A field is invalid; the message names it.
    """
    name, asked = ("prompt", prompt) if question is None else ("question", question)
    is_one = isinstance(asked, str) and asked.strip() and (question is None or prompt is None)
    if is_one and all(type(value) is str and value for _, value in responses):
        asked, *texts = (fields.text(value, where, name) for name, value in ((name, asked), *responses))
        return (Message("user", asked),), tuple(texts)
    return get("messages", "read").value(question, prompt, responses, where=where, found=found)
