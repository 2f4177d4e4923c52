"""Responses as conversations: the messages that all share are the prompt."""

import csv
import json
import pickle
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prb_jax.errors import DataError, PrbWarning
from prb_jax.records import files as json_lines
from prb_jax.records.comparison import Comparison, Message
from prb_jax.records.conversation import Turns, turns_of
from prb_jax.records.fields import CONTEXT_FIELDS, NAME_FIELDS
from prb_jax.records.intake import open_comparisons, read_comparisons
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


FIELDS = {  # of a message, what chat templates read beside role and content
    "tool_calls": [{"type": "function", "function": {"name": "kettle", "arguments": {"cups": 1}}}],
    "function_call": {"name": "kettle"},
    "tool_call_id": "call-1",
    "name": "kettle",
    "reasoning_content": "The user likes tea.",
    "reasoning": "The user likes tea.",
    "thinking": "The user likes tea.",
    "tool_plan": "First water.",
}
TOOLS = [{"type": "function", "function": {"name": "kettle", "parameters": {"type": "object"}}}]


def messages_of(comparison, k):
    return [turn.as_dict() for turn in (*comparison.prompt, *turns_of(comparison.responses[k]))]


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_message_is_kept(name):
    extra = {name: FIELDS[name]}
    for row in (
        {"chosen": [USER, GOOD], "rejected": [USER, BAD | extra]},
        {"chosen": [USER, GOOD], "rejected": [USER, GOOD | extra]},  # no tie
        {"responses": [[USER, GOOD | extra, MORE, GOOD], [USER, GOOD, MORE, GOOD]], "labels": [1, 0]},
    ):
        comparison = Comparison.from_row(row, where="f:1")
        given = row.get("responses") or [row["chosen"], row["rejected"]]
        assert [messages_of(comparison, k) for k in (0, 1)] == given
        assert comparison.responses[0] != comparison.responses[1]
        assert len(comparison.prompt) == 1
        for again in (
            Comparison.from_row(json.loads(json.dumps(comparison.to_row())), where="f:1"),
            Comparison(
                id=comparison.id, prompt=comparison.prompt, responses=comparison.responses, labels=[1, 0]
            ),
            pickle.loads(pickle.dumps(comparison)),
        ):
            assert again == comparison
        spoken = name not in NAME_FIELDS
        assert (json.dumps(extra, ensure_ascii=False) in "\n".join(comparison.responses)) == spoken


def test_tools_and_their_results_in_a_prompt():
    call = {"role": "assistant", "content": None, "tool_calls": FIELDS["tool_calls"]}
    result = {"role": "tool", "name": "kettle", "content": [{"type": "text", "text": "Hot."}]}
    prompt = [{"role": "developer", "content": "Be brief."}, USER, call, result]
    row = {"id": "1", "prompt": prompt, "chosen": "Done.", "rejected": "What?", "tools": json.dumps(TOOLS)}
    comparison = Comparison.from_row(row | {"chat_template_kwargs": {"enable_thinking": False}}, where="f:1")
    assert [turn.as_dict() for turn in comparison.prompt] == prompt
    assert [turn.content for turn in comparison.prompt[1:]] == [
        "Which tea?", json.dumps({"tool_calls": FIELDS["tool_calls"]}), "Hot."
    ]  # fmt: skip
    assert comparison.question == "Which tea?"
    assert json.loads(comparison.context) == {
        "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}
    }  # fmt: skip
    assert Comparison.from_row(comparison.to_row(), where="f:1") == comparison
    other = Comparison.from_row(row | {"tools": None}, where="f:1")
    assert other.prompt != comparison.prompt
    assert other.to_row().keys() == {"id", "prompt", "chosen", "rejected"}


def test_conversations_that_part_before_the_last_turn():
    early = Comparison(chosen=[USER, GOOD, MORE, GOOD], rejected=[USER, BAD, MORE, BAD])
    assert [len(early.prompt), *(len(turns_of(text)) for text in early.responses)] == [1, 3, 3]
    assert early.responses[1] == Turns(tuple(Message(**turn) for turn in (BAD, MORE, BAD)))
    assert str(early.responses[1]) == "Assistant: None.\n\nUser: And why?\n\nAssistant: None."
    assert early.responses[1] != str.__str__(early.responses[1])  # equal to no plain text
    uneven = Comparison(prompt=[USER], chosen=[GOOD, MORE, GOOD], rejected=[BAD])
    assert messages_of(uneven, 0) == [USER, GOOD, MORE, GOOD]
    assert uneven.responses[1] == "None."
    systems = Comparison(chosen=[SYSTEM, USER, GOOD], rejected=[USER, BAD], tools=TOOLS)
    assert (systems.prompt, systems.question) == ((), "")
    assert [messages_of(systems, k) for k in (0, 1)] == [[SYSTEM, USER, GOOD], [USER, BAD]]
    for one in (early, uneven, systems):
        assert Comparison.from_row(one.to_row(), where="f:1") == one
        alone = [Comparison(prompt=one.prompt, responses=[text]) for text in one.responses]
        assert [messages_of(single, 0) for single in alone] == [messages_of(one, k) for k in (0, 1)]
        assert {single.context for single in alone} == {one.context}


def test_a_table_does_not_fill_calls_with_nulls(tmp_path):
    """Arrow gives each struct the fields of all: a call of a kettle would have the argument of a lamp."""
    calls = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }
        for name, arguments in (("kettle", {"cups": 1}), ("lamp", {"on": True}))
    ]
    row = {"id": "1", "prompt": [USER], "chosen": [calls[0]], "rejected": [calls[1]], "tools": TOOLS}
    other = {"id": "2", "prompt": [USER], "chosen": [calls[1], USER, calls[0]], "rejected": [GOOD]}
    expected = [Comparison.from_row(one, where="f:1") for one in (row, other)]
    table = pa.Table.from_pylist([row, other])
    pq.write_table(table, tmp_path / "x.parquet")
    filled = table["chosen"].to_pylist()[0][0]["tool_calls"][0]["function"]["arguments"]
    assert filled == {"cups": 1, "on": None}
    assert read_comparisons(tmp_path / "x.parquet") == read_comparisons(table) == expected


def test_texts_continue_a_prefill():
    start = {"role": "assistant", "content": "Tea: "}
    comparison = Comparison(id="1", prompt=[USER, start], chosen="Green.", rejected="None.")
    assert comparison == Comparison(
        id="1", question="Which tea?", chosen="Tea: Green.", rejected="Tea: None."
    )
    messages = Comparison(prompt=[USER, start], chosen=[GOOD], rejected=[BAD])  # as TRL renders it
    assert messages_of(messages, 0) == [USER, start, GOOD]
    with pytest.raises(DataError, match=r"'prompt\[1\]': is one of the responses already"):
        Comparison(id="1", prompt=[USER, start], chosen="Tea:", rejected="None.")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [USER | {"images": ["a.png"]}]}, r"'prompt\[0\]\.images': is not rendered"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]},
            r"'prompt\[0\]\.content\[0\]\.type': expected 'text', found 'image'",
        ),
        ({"prompt": [{"role": "user", "content": None, "name": "a"}]}, r"'prompt\[0\]\.content': missing"),
        (
            {"prompt": [USER | {"tool_call": TOOLS}]},
            r"'prompt\[0\]\.tool_call': is no field of a message and is not read; rename it to 'tool_calls'",
        ),
        (
            {"prompt": [USER | {"thoughts": "Hot."}]},
            r"'prompt\[0\]\.thoughts': .* rename it to 'reasoning_content'",
        ),
        ({"prompt": [{"role": "critic", "content": "a"}]}, r"'prompt\[0\]\.role': expected one of system, developer"),
        ({"tools": {"name": "a"}}, "'tools': expected a list of tools"),
        ({"tools": ["kettle"]}, r"'tools\[0\]': expected an object"),
        ({"tools": [{"name": {1}}]}, "'tools': expected values of JSON"),
        ({"chat_template_kwargs": "on"}, "'chat_template_kwargs': expected an object"),
        ({"chat_template_kwargs": {"messages": [1]}}, r"'chat_template_kwargs\.messages': is set by the rendering"),
    ],
)  # fmt: skip
def test_what_no_template_can_read_is_named(row, message):
    plain = {"prompt": [USER], "chosen": "Green.", "rejected": "None."}
    with pytest.raises(DataError, match=f"^f:1: field {message}"):
        Comparison.from_row(plain | row, where="f:1")


@pytest.mark.parametrize("kind", ["x.jsonl", "large x.jsonl", "x.parquet", "objects", "table"])
def test_fields_of_messages_and_posts_that_nobody_reads_are_named_once(kind, tmp_path, monkeypatch):
    posts = [{"id": "p", "category": "food", "text": "I like tea.", "mood": mood} for mood in (None, "good")]
    chosen = [GOOD | {"weight": weight} for weight in (None, 0.5)]
    rows = [
        {
            "id": str(k),
            "prompt": [USER],
            "chosen": [chosen[k % 2]],
            "rejected": [BAD],
            "profile": [posts[k % 2]],
        }
        for k in range(4)
    ]
    if kind.startswith("large"):
        monkeypatch.setattr(json_lines, "LARGE", 1)
    data = tmp_path / kind.removeprefix("large ")
    where = "row 2"
    if data.suffix == ".jsonl":
        write_lines(data, rows)
        where = f"{data}:2"
    elif data.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data, where = pa.Table.from_pylist(rows) if kind == "table" else rows, "position 1"
    with pytest.warns(PrbWarning) as told:
        assert len(list(open_comparisons(data)) if kind.startswith("large") else read_comparisons(data)) == 4
    expected = (
        f"{where}: field 'mood' of a post and field 'weight' of a message: not read, so no model sees it"
    )
    assert [expected in str(one.message) for one in told].count(True) == len(told) == 1, told.list


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
def test_a_field_of_a_record_is_kept_or_named(kind, name, value, tmp_path, monkeypatch):
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
    if name in CONTEXT_FIELDS:
        first, second = list(open_comparisons(data)) if kind.startswith("large") else read_comparisons(data)
        assert (first.context, json.loads(second.context)) == ("", {name: value})
        return
    message = f"{re.escape(where)}: field '{name}': is not rendered, .*, found .*kettle"
    with pytest.raises(DataError, match=message):
        list(open_comparisons(data)) if kind.startswith("large") else read_comparisons(data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [USER, GOOD], "rejected": "None."}, "'chosen': expected a string, found .*; responses are all"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "'question': missing; .*or messages before a response"),
        ({"chosen": [], "rejected": [USER, BAD]}, "'chosen': no messages"),
        (
            {"chosen": [USER, GOOD], "rejected": [MORE, BAD]},
            "'rejected': expected the question of 'chosen', 'Which tea.', found 'And why",
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, MORE]}, r"'rejected\[-1\]\.role': expected .*, found 'user'"),
        ({"chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]}, "'question': missing; .*or messages before a resp"),
        ({"prompt": [SYSTEM], "chosen": "a", "rejected": "b"}, r"'prompt\[0\]\.role': expected 'user'"),
        ({"prompt": "Else?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "'prompt': differs from the messages"),
        (
            {"chosen": [USER, {"role": "assistant", "content": ""}], "rejected": [USER, BAD]},
            r"'chosen\[-1\]\.content': empty",
        ),
        (
            {"chosen": [USER, {"role": "tool", "content": "x"}], "rejected": [USER, BAD]},
            r"'chosen\[-1\]\.role': expected .* ends with the assistant's message, found 'tool'",
        ),
        ({"chosen": [USER, {"from": "gpt", "value": "x"}], "rejected": [USER, BAD]}, r"'chosen\[1\]\.role': missing"),
    ],
)  # fmt: skip
def test_bad_conversations_are_named(row, message):
    with pytest.raises(DataError, match=f"^f:1: field {message}"):
        Comparison.from_row({"id": 1} | row, where="f:1")
