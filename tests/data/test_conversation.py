"""Responses as conversations: the messages that all share are the prompt."""

import pytest

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import DataError

USER, SYSTEM = {"role": "user", "content": "Which tea?"}, {"role": "system", "content": "Be brief."}
GOOD, BAD = {"role": "assistant", "content": "Green."}, {"role": "assistant", "content": "None."}
MORE = {"role": "user", "content": "And why?"}
PLAIN = Comparison(id="1", question="Which tea?", chosen="Green.", rejected="None.")


def pair(before, *, prompt=None, **fields):
    row = {"id": "1", "chosen": [*before, GOOD], "rejected": [*before, BAD], **fields}
    return Comparison.from_row(row if prompt is None else row | {"prompt": prompt}, where="f:1")


@pytest.mark.parametrize(
    ("before", "prompt"),
    [([USER], None), ([USER], "Which tea?"), ([USER], [USER]), ([], "Which tea?"), ([], [USER])],
)
def test_every_spelling_of_a_pair_is_the_same_comparison(before, prompt):
    comparison = pair(before, prompt=prompt)
    assert comparison == PLAIN
    assert comparison.is_pair


def test_a_conversation_of_several_turns():
    turns = [SYSTEM, USER, BAD, MORE]
    expected = tuple(Message(**turn) for turn in turns)
    for comparison in (
        pair(turns),
        pair(turns, prompt=turns),
        pair(turns, prompt=[USER, BAD, MORE]),  # without the system message
        pair(turns, prompt="Which tea?"),  # only the first question, as some data sets have it
        pair([BAD, MORE], prompt=[SYSTEM, USER]),  # the conversation goes on after the prompt
    ):
        assert comparison.prompt == expected
        assert comparison.responses == ("Green.", "None.")
        assert Comparison.from_row(comparison.to_row(), where="f:1") == comparison


def test_several_conversations_and_extra_keys():
    responses = [[USER, turn | {"tool_calls": None}] for turn in (GOOD, BAD, GOOD)]
    plain = Comparison(id=1, question="Which tea?", responses=["Green.", "None.", "Green."], labels=[2, 1, 0])
    assert Comparison(id=1, responses=responses, labels=[2, 1, 0]) == plain
    objects = [[Message("user", "Which tea?"), Message("assistant", text)] for text in ("a", "b")]
    assert Comparison(chosen=objects[0], rejected=objects[1]).responses == ("a", "b")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [USER, GOOD], "rejected": "None."}, "'chosen': expected a string, found .*; responses are all"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "'question': missing; .*or messages before a response"),
        ({"chosen": [], "rejected": [USER, BAD]}, "'chosen': no messages"),
        ({"chosen": [USER, GOOD], "rejected": [MORE, BAD]}, "'chosen': after 0 messages .*, found user, assistant"),
        ({"chosen": [USER, GOOD], "rejected": [USER, MORE]}, "'rejected': after 1 messages .*, found user"),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD, MORE, BAD]},
            "'rejected': after 1 messages .* expected one of the assistant, found assistant, user, assistant",
        ),
        ({"chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]}, r"'chosen\[0\]\.role': expected 'user'"),
        ({"prompt": "Else?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "'prompt': differs from the messages"),
        (
            {"chosen": [USER, {"role": "assistant", "content": ""}], "rejected": [USER, BAD]},
            r"'chosen\[1\]\.content': empty",
        ),
        (
            {"chosen": [USER, {"role": "tool", "content": "x"}], "rejected": [USER, BAD]},
            r"'chosen\[1\]\.role': expected one of system",
        ),
        ({"chosen": [USER, {"from": "gpt", "value": "x"}], "rejected": [USER, BAD]}, r"'chosen\[1\]\.role': missing"),
    ],
)  # fmt: skip
def test_bad_conversations_are_named(row, message):
    with pytest.raises(DataError, match=f"^f:1: field {message}"):
        Comparison.from_row({"id": 1} | row, where="f:1")
