"""Shortens a prompt that does not fit its length limit, losing as little as possible from its start."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison, Message

Fits = Callable[[Sequence[Message]], bool]

LONGEST_MEAN_WORD = 24
"""Text whose blank-separated words are longer than this on average (Chinese, base64) is cut by characters."""


class TooLongError(DataError):
    """A response that leaves no room for its prompt within the length limit.

    Attributes:
      comparison: which one.
      tokens: of its longest conversation, without profile.
      limit: the most tokens that a conversation may have.
    """

    def __init__(self, comparison: Comparison, *, tokens: int, responses: Sequence[int], limit: int) -> None:
        self.comparison, self.tokens, self.limit = comparison, tokens, limit
        super().__init__(
            f"comparison {quote(comparison.id)}: its longest conversation has {tokens} tokens without profile and the"
            f" responses alone {min(responses)} to {max(responses)}; with the chat template that leaves no room for"
            f" the prompt within max_length {limit}, and responses are never cut"
        )


def shorten_prompt(messages: Sequence[Message], *, fits: Fits) -> tuple[Message, ...] | None:
    """The longest version of `messages` that fits, or None if none does.

    Earlier turns go first, whole and the oldest first, always up to a user's turn so that roles
    still alternate. Then the start of the longer of question and system message is cut, then that
    of the other. The last word of the question always stays; a system message may go entirely.

    Args:
      messages: an optional system message, then turns that end with the user's question.
      fits: whether the conversation with this prompt is within the limit. Taken to be monotone:
        what is shorter fits where something longer does.
    """
    system = tuple(messages[:1]) if messages[0].role == "system" else ()
    turns = tuple(messages[len(system) :])
    starts = [i for i, message in enumerate(turns) if message.role == "user"]
    kept = _first(len(starts), lambda i: fits(system + turns[starts[i] :]))
    if kept is not None:
        return system + turns[starts[kept] :]
    question = turns[-1]
    cut_system_first = bool(system) and len(system[0].content) > len(question.content)
    steps = (_cut_system, _cut_question) if cut_system_first else (_cut_question, _cut_system)
    prompt = (*system, question)
    for step in steps:
        prompt, fitting = step(prompt, fits)
        if fitting:
            return prompt
    return None


def shortest_prompts(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """The shortest prompts that `shorten_prompt` tries: the last word of the question, alone or after that of a
    system message (a template may put a system message of its own where there is none)."""

    def last_word(message: Message) -> Message:
        return Message(message.role, message.content[cut_places(message.content)[-1] :])

    question = last_word(messages[-1])
    with_system = [(last_word(messages[0]), question)] if messages[0].role == "system" else []
    return [(question,), *with_system]


def _cut_system(prompt: tuple[Message, ...], fits: Fits) -> tuple[tuple[Message, ...], bool]:
    """The prompt with as much of the end of its system message as fits (else none of it)."""
    *system, question = prompt
    if not system:
        return prompt, False
    text = system[0].content
    places = cut_places(text)

    def cut(place: int) -> tuple[Message, ...]:
        return (Message("system", text[place:]), question)

    kept = _first(len(places), lambda i: fits(cut(places[i])))
    if kept is not None:
        return cut(places[kept]), True
    return (question,), fits((question,))


def _cut_question(prompt: tuple[Message, ...], fits: Fits) -> tuple[tuple[Message, ...], bool]:
    """The prompt with as much of the end of its question as fits (else its last word)."""
    *system, question = prompt
    places = cut_places(question.content)

    def cut(place: int) -> tuple[Message, ...]:
        return (*system, Message(question.role, question.content[place:]))

    kept = _first(len(places), lambda i: fits(cut(places[i])))
    return cut(places[-1 if kept is None else kept]), kept is not None


def cut_places(text: str) -> list[int]:
    """Where `text` may begin after a cut: at its words, or at any character if it has hardly any blanks."""
    words = [match.start() for match in re.finditer(r"\S+", text)]
    if not words or len(text) > LONGEST_MEAN_WORD * len(words):
        return list(range(len(text))) or [0]
    return words


def _first(count: int, holds: Callable[[int], bool]) -> int | None:
    """The first of 0..count-1 for which `holds` is true, given that it stays true once it is."""
    if count == 0 or not holds(count - 1):
        return None
    return bisect.bisect_left(range(count - 1), True, key=holds)
