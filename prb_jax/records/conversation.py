"""Prompts and responses: texts, or lists of messages that become a prompt and K responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from prb_jax.errors import quote
from prb_jax.records import fields
from prb_jax.records.message import Message, Messages, joined_parts, read_message

RENDERED: Final = "rendered"
"""Role of the single message of an already rendered prompt: the prompt and its responses are used unchanged."""

ASKING: Final = ("user", "tool")
"""Roles of the last message of a prompt, to which the assistant responds."""


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


def as_response(messages: Messages) -> str:
    """Return messages as a response: plain text for a single plain message, else :class:`Turns`."""
    plain = len(messages) == 1 and messages[0] == Message("assistant", messages[0].content)
    return messages[0].content if plain else Turns(messages)


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


def rendered_prompt(prompt: object, responses: Sequence[tuple[str, object]], where: str) -> Messages:
    """Return a prompt of rendered text, which may be empty if the responses are whole conversations.

    Raises:
      DataError: The prompt or a response is not a text.
    """
    text = fields.optional_text(prompt, where, "prompt") or ""
    for name, value in responses:
        fields.text(value, where, name)
    return (Message(RENDERED, text),)


def split_response(messages: Messages, *, at: int | None = None) -> tuple[Messages, str]:
    """Return the prompt and the response of a conversation that ends with the assistant's message.

    Args:
      messages: The conversation.
      at: Maximum number of messages of the prompt, which ends with a role of `ASKING` or is empty.
    """
    at = len(messages) - 1 if at is None else at
    while at and messages[at - 1].role not in ASKING:
        at -= 1
    return messages[:at], as_response(messages[at:])


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
    given = None if prompt is None or prompt == () else _prompt(prompt, where, "prompt")
    if question is not None:
        asked = _prompt(question, where, "question")
        if given not in (None, asked):
            fields.fail(where, "prompt", "differs from 'question'; expected one of the two")
        given = asked
    for name, value in responses:
        if value is None:
            fields.fail(where, name, f"missing{found}")
    written_out = [isinstance(value, list | tuple | Turns) for _, value in responses]
    if not any(written_out):
        if given is None:
            fields.fail(
                where,
                "question",
                "missing; expected 'question' or 'prompt'; if each response is a whole conversation in one text, use "
                f"--rendered (or a name that ends in '?rendered'){found}",
            )
        texts = tuple(_response(value, where, name) for name, value in responses)
        if given[-1].role != "assistant":
            return given, texts
        *before, prefill = given
        start, place = joined_parts(prefill.as_dict().get("content")) or "", _asked(before)
        if start.strip() and start.strip() in (text.strip() for text in texts):
            about = "is one of the responses already; expected the conversation before them"
            fields.fail(where, f"prompt[{len(given) - 1}]", about)
        answers = [(*before[place:], prefill.with_content(f"{start}{text}")) for text in texts]
        return tuple(before[:place]), tuple(map(as_response, answers))
    plain = [k for k, value in enumerate(written_out) if not value]
    if plain and not any(isinstance(value, Turns) for _, value in responses):
        name, value = responses[written_out.index(True)]
        all_alike = "responses are all texts or all lists of messages"
        fields.fail(where, name, f"expected a string, found {fields.found(value)}; {all_alike}")
    conversations = {
        name: _joined(given, _turns(value, where, name), where, name) for name, value in responses
    }
    for name, messages in conversations.items():
        if messages[-1].role != "assistant":
            expected = "expected a conversation that ends with the assistant's message"
            fields.fail(where, f"{name}[-1].role", f"{expected}, found {quote(messages[-1].role)}")
        if not messages[-1].content:
            fields.fail(where, f"{name}[-1].content", "empty; expected a response")
        if not _asked(messages):
            expected = "missing; expected 'question' or 'prompt', or messages before a response"
            fields.fail(where, "question", expected)
    first, *others = conversations.values()
    for name, messages in conversations.items():
        if _opening(messages) != _opening(first):
            expected = f"expected the question of '{responses[0][0]}', {quote(_opening(first).content)}"
            fields.fail(where, name, f"{expected}, found {quote(_opening(messages).content)}")
    count = min(map(len, conversations.values())) - 1
    while any(messages[:count] != first[:count] for messages in others):
        count -= 1
    parts = [split_response(messages, at=count) for messages in conversations.values()]
    shared = parts[0][0]
    if shared:
        _check_prompt(shared, where, responses[0][0])
    return shared, tuple(response for _, response in parts)


def _asked(messages: Sequence[Message]) -> int:
    """Return the number of messages up to the last one with a role of `ASKING`."""
    return max((k + 1 for k, message in enumerate(messages) if message.role in ASKING), default=0)


def _opening(messages: Messages) -> Message:
    """Return the first message after system and developer messages; compared conversations share it."""
    return next(message for message in messages if message.role not in ("system", "developer"))


def _turns(value: object, where: str, name: str) -> Messages:
    if isinstance(value, str):
        return turns_of(_response(value, where, name))
    return _messages(value, where, name)


def _joined(given: Messages | None, messages: Messages, where: str, name: str) -> Messages:
    """Return a whole conversation from the given prompt and the messages of a response."""
    if given is None:
        return messages
    if messages[0].role in ("assistant", "tool"):  # the conversation goes on after the prompt
        return given + messages
    if not any(messages[i : i + len(given)] == given for i in range(len(messages))):
        fields.fail(where, "prompt", f"differs from the messages before the response in '{name}'")
    return messages


def _prompt(value: object, where: str, name: str) -> Messages:
    if isinstance(value, str):
        messages: Messages = (Message("user", fields.text(value, where, name)),)
    else:
        messages = _messages(value, where, name)
    _check_prompt(messages, where, name)
    return messages


def _check_prompt(messages: Messages, where: str, name: str) -> None:
    if is_rendered(messages):
        return
    place = _asked(messages)
    if not place or any(message.role != "assistant" for message in messages[place:]):
        found = quote(messages[-1].role)
        fields.fail(where, f"{name}[{len(messages) - 1}].role", f"expected 'user', found {found}")
    last = messages[place - 1]
    if last.role == "user" and not last.content.strip():
        fields.fail(where, name, "the question is empty")


def _messages(value: object, where: str, name: str) -> Messages:
    if not isinstance(value, list | tuple):
        fields.fail(where, name, f"expected a string or a list of messages, found {fields.found(value)}")
    messages = tuple(read_message(item, where, f"{name}[{i}]") for i, item in enumerate(value))
    if not messages:
        fields.fail(where, name, "no messages; expected at least one")
    for i, message in enumerate(messages):
        if message.role == "system" and i > 0:
            fields.fail(where, f"{name}[{i}].role", "a system message may only come first")
    return messages


def _response(value: object, where: str, name: str) -> str:
    if isinstance(value, Turns):
        return value
    text = fields.text(value, where, name)
    if not text:
        fields.fail(where, name, "empty; expected a response")
    return text
