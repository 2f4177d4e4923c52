"""How a prompt is shortened: what goes first, what stays, and that as little as possible goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from prb_jax.records.comparison import Message
from prb_jax.scoring.shorten import cut_places, shorten_prompt


def words_fit(limit: int) -> Callable[[Sequence[Message]], bool]:
    """Counts one word for every turn's header, as a template would."""
    return lambda messages: sum(1 + len(message.content.split()) for message in messages) <= limit


def prompt(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    roles = ["user", "assistant"] * len(contents)
    turns = tuple(Message(role, content) for role, content in zip(roles, contents))
    return turns if system is None else (Message("system", system), *turns)


def test_earlier_turns_go_whole_and_the_oldest_first() -> None:
    messages = prompt("a b", "c d", "e f", "g h", "i j", system="s t")
    assert shorten_prompt(messages, fits=words_fit(18)) == messages
    # 15 words would do without the first user's turn alone, but a conversation starts with a user.
    assert shorten_prompt(messages, fits=words_fit(17)) == (messages[0], *messages[3:])
    assert shorten_prompt(messages, fits=words_fit(12)) == (messages[0], *messages[3:])
    assert shorten_prompt(messages, fits=words_fit(11)) == (messages[0], *messages[5:])


def test_then_the_start_of_the_question_goes_word_by_word() -> None:
    messages = prompt("old", "older", "one two  three\nfour", system="be brief")
    cut = shorten_prompt(messages, fits=words_fit(6))
    assert cut == (Message("system", "be brief"), Message("user", "three\nfour"))
    assert shorten_prompt(messages, fits=words_fit(5)) == (messages[0], Message("user", "four"))


def test_the_longer_of_system_message_and_question_is_cut_first() -> None:
    messages = prompt("what now", system="always be very brief and kind")
    assert shorten_prompt(messages, fits=words_fit(6)) == (Message("system", "and kind"), messages[1])
    # the system message may go entirely, and only then is the question cut
    assert shorten_prompt(messages, fits=words_fit(3)) == (messages[1],)
    assert shorten_prompt(messages, fits=words_fit(2)) == (Message("user", "now"),)
    assert shorten_prompt(messages, fits=words_fit(1)) is None


def test_after_a_long_question_the_system_message_goes() -> None:
    messages = prompt("one two three", system="s t")
    assert shorten_prompt(messages, fits=words_fit(4)) == (Message("system", "t"), Message("user", "three"))
    assert shorten_prompt(messages, fits=words_fit(2)) == (Message("user", "three"),)


@pytest.mark.parametrize("length", range(1, 40))
def test_as_little_as_possible_goes(length: int) -> None:
    question = " ".join(str(i) for i in range(40))
    cut = shorten_prompt(prompt(question), fits=words_fit(1 + length))
    assert cut == (Message("user", " ".join(str(i) for i in range(40 - length, 40))),)


def test_text_without_blanks_is_cut_by_characters() -> None:
    text = "我住在一个很小的城市里" * 5
    assert cut_places(text) == list(range(len(text)))
    cut = shorten_prompt(prompt(text), fits=lambda messages: len(messages[0].content) <= 7)
    assert cut == (Message("user", text[-7:]),)
    assert cut_places(" two words ") == [1, 5]
    assert cut_places("") == [0]
