"""Responses as conversations: the messages that all share are the prompt."""

import csv
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prb_jax.errors import DataError
from prb_jax.records import lines as json_lines
from prb_jax.records.comparison import Comparison, Message
from prb_jax.records.sources.reading import open_comparisons, read_comparisons
from tests.json_lines import write_lines

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
    nothing = {"tool_calls": None, "name": "", "reasoning_content": None, "thinking": [], "weight": 1}
    responses = [[USER, turn | nothing] for turn in (GOOD, BAD, GOOD)]
    plain = Comparison(id=1, question="Which tea?", responses=["Green.", "None.", "Green."], labels=[2, 1, 0])
    assert Comparison(id=1, responses=responses, labels=[2, 1, 0]) == plain
    objects = [[Message("user", "Which tea?"), Message("assistant", text)] for text in ("a", "b")]
    assert Comparison(chosen=objects[0], rejected=objects[1]).responses == ("a", "b")


EXTRAS = {  # of a message, what chat templates read beside role and content
    "tool_calls": [{"type": "function", "function": {"name": "kettle", "arguments": {"cups": 1}}}],
    "function_call": {"name": "kettle"},
    "tool_call_id": "call-1",
    "name": "kettle",
    "reasoning_content": "The user likes tea.",
    "reasoning": "The user likes tea.",
    "thinking": "The user likes tea.",
    "images": ["tea.png"],
    "videos": ["tea.mp4"],
}
TOOLS = [{"type": "function", "function": {"name": "kettle", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", EXTRAS)
def test_a_field_of_a_message_that_would_not_be_rendered_is_named(name):
    extra = {name: EXTRAS[name]}
    for row, field in (
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD | extra]}, f"rejected[1].{name}"),
        ({"prompt": [SYSTEM, USER | extra], "chosen": "a", "rejected": "b"}, f"prompt[1].{name}"),
        ({"question": [USER | extra], "responses": ["a", "b"], "labels": [1, 0]}, f"question[0].{name}"),
        (
            {"prompt": [USER, GOOD | extra | {"content": None}, MORE], "chosen": "a", "rejected": "b"},
            f"prompt[1].{name}",
        ),
    ):
        with pytest.raises(DataError, match=f"^f:1: field '{re.escape(field)}': is not rendered, .*, found "):
            Comparison.from_row({"id": 1} | row, where="f:1")


@pytest.mark.parametrize(
    "kind", ["x.jsonl", "large x.jsonl", "x.json", "x.csv", "x.parquet", "objects", "table"]
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", TOOLS),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"title": "kettle", "text": "Of steel."}]),
        ("images", ["kettle.png"]),
    ],
)
def test_a_field_of_a_record_that_would_not_be_rendered_is_named(kind, name, value, tmp_path, monkeypatch):
    """In the second row of every kind of data; in the first it is null, or holds nothing but nulls."""
    pair, where = {"question": "Which tea?", "chosen": "Green.", "rejected": "None."}, "row 2"
    rows = [pair | {"id": "1", name: None}, pair | {"id": "2", name: value}]
    if kind.startswith("large"):
        monkeypatch.setattr(json_lines, "LARGE", 1)
    data = tmp_path / kind.removeprefix("large ")
    if data.suffix in (".jsonl", ".json"):
        write_lines(data, rows)
        where = f"{data}:2"
    elif data.suffix == ".csv":
        with data.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows([rows[0] | {name: "null"}, rows[1] | {name: json.dumps(value)}])
        where = f"{data}:3"
    elif data.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data, where = pa.Table.from_pylist(rows) if kind == "table" else rows, "position 1"
    message = f"{re.escape(where)}: field '{name}': is not rendered, .*, found .*(kettle|enable_thinking)"
    with pytest.raises(DataError, match=message):
        list(open_comparisons(data)) if kind.startswith("large") else read_comparisons(data)


def test_the_shared_cases_are_refused_by_name(tmp_path):
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "cases"
    if not folder.is_dir():
        pytest.skip(f"no cases at {folder}")
    for name, fields in (
        ("message_fields.jsonl", [r"chosen\[1\]\.reasoning_content", r"chosen\[1\]\.tool_calls", "tools"]),
        ("tools.jsonl", ["tools"]),
    ):
        for line, field in zip((folder / name).read_text().splitlines(), fields, strict=True):
            data = tmp_path / "x.jsonl"
            data.write_text(line)
            with pytest.raises(DataError, match=f"x.jsonl:1: field '{field}': is not rendered"):
                read_comparisons(data)


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
