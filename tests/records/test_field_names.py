"""Columns with other names than the fields of a record: told, or mapped."""

import contextlib
import csv
import json
import warnings
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prb_jax.errors import DataError, PrbWarning
from prb_jax.records import files as json_lines
from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import is_rendered
from prb_jax.records.foreign_fields import nearest_field
from prb_jax.records.intake import describe_source, open_comparisons, read_comparisons
from prb_jax.records.layouts import PROMPT_COLUMNS
from prb_jax.records.sources.whole import source_rows
from tests.json_lines import write_lines

PAIR = {"chosen": "a", "rejected": "b"}
ROWS = [
    {"id": str(i), "question": f"q{i}", **PAIR, "user": f"u{i}", "posts": ["x", "y"], "meta": 1}
    for i in range(4)
]
COLUMNS = "?user_id=user&profile=posts"


@pytest.fixture(params=["x.jsonl", "x.csv", "x.parquet", "folder", "large x.jsonl", "large x.parquet"])
def data(request, tmp_path, monkeypatch):
    """The rows as a source of each kind."""
    name = request.param.removeprefix("large ")
    if name != request.param:
        monkeypatch.setattr(json_lines, "LARGE", 1)
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        path /= "test.jsonl"
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif name.endswith(".csv"):
        lines = [f'{r["id"]},{r["question"]},a,b,{r["user"]},"[""x"",""y""]",1' for r in ROWS]
        path.write_text("\n".join(["id,question,chosen,rejected,user,posts,meta", *lines]) + "\n")
    else:
        write_lines(path, ROWS)
    return tmp_path / name


def test_a_name_like_that_of_a_field_is_told_once(data):
    with pytest.warns(PrbWarning) as told:
        users = [comparison.user_id for comparison in open_comparisons(data)]
    assert users == [None] * 4
    texts = sorted(str(warning.message) for warning in told if warning.category is PrbWarning)
    assert len(texts) == 2, texts
    for text, name, field in zip(texts, ("posts", "user"), ("profile", "user_id")):
        told_of = f"{name!r} is not a field of a record, so it is not read; to read it as {field!r}"
        assert f"{told_of}, add '?{field}={name}' to the name of the data (" in text
        assert f"--columns {field}={name})" in text


def test_columns_are_mapped(data, request):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = open_comparisons(f"{data}{COLUMNS}")
        comparisons = list(opened)
        assert comparisons == read_comparisons(f"{data}{COLUMNS}")
    assert opened.in_memory != ("large" in request.node.name)
    assert [comparison.user_id for comparison in comparisons] == ["u0", "u1", "u2", "u3"]
    assert [[post.text for post in comparison.profile] for comparison in comparisons] == [["x", "y"]] * 4
    mapped = describe_source(f"{data}{COLUMNS}")
    assert mapped.pop("columns") == {"user_id": "user", "profile": "posts"}
    assert mapped == describe_source(data)
    assert data.suffix != ".jsonl" or source_rows(f"{data}{COLUMNS}")[0].value["user_id"] == "u0"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("user_id=voter", "x.jsonl: columns: user_id=voter: no field 'voter' in any record"),
        (
            "uid=user",
            "columns: 'uid' is not a field; expected FIELD=COLUMN with a field of a record: id, quest",
        ),
        ("user_id=id", "columns: user_id=id: 'id' is itself a field of a record"),
        ("question=user", "x.jsonl:1: field 'question': given beside 'user', which is mapped to it"),
    ],
)
@pytest.mark.filterwarnings("ignore::prb_jax.PrbWarning")
def test_a_mapping_that_cannot_be(columns, message, tmp_path):
    path = write_lines(tmp_path / "x.jsonl", ROWS)
    with pytest.raises(DataError, match=message):
        read_comparisons(f"{path}?{columns}")


@pytest.mark.filterwarnings("ignore::prb_jax.PrbWarning")
def test_a_mapped_column_that_many_records_lack(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LARGE", 1)
    path = write_lines(tmp_path / "x.jsonl", [ROWS[0] | {"id": i} for i in range(1001)])
    with pytest.raises(DataError, match="no field 'voter' in the first 1,000 records"):
        list(open_comparisons(f"{path}?user_id=voter&profile=posts"))


def test_generated_data_has_no_columns_to_map():
    with pytest.raises(DataError, match="can be mapped only in files, folders and hub data sets"):
        read_comparisons("personas:test-seen?user_id=user")


def test_a_file_may_have_a_question_mark_in_its_name(tmp_path):
    path = write_lines(tmp_path / "x?user_id=user.jsonl", ROWS[:1])
    with pytest.warns(PrbWarning):
        assert len(read_comparisons(path)) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user", "user_id"), ("userid", "user_id"), ("User-ID", "user_id"), ("annotator_id", "user_id"),
        ("customer_id", "user_id"), ("profile_text", "profile"),
        ("profiles", "profile"), ("history", "profile"), ("chosen_", "chosen"), ("label", "labels"),
        ("user_id", None), ("meta", None), ("source", None), ("domain", None), ("score", None), ("名前", None),
    ],
)  # fmt: skip
def test_nearest_field(name, expected):
    assert nearest_field(name) == expected


def test_a_field_that_another_one_stands_for_is_not_missed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_comparisons(PAIR | {"question": "q", "user_id": "u", "user": "x", "label": 1, "query": "q"})


ALPACA = {
    "instruction": "Translate.",
    "input": "dog",
    "system": "Be brief.",
    "history": [["cat?", "chat"]],
    **PAIR,
}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "cat?"},
    {"role": "assistant", "content": "chat"},
    {"role": "user", "content": "Translate.\ndog"},
]


def told(read):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(DataError):
            read()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("kind", ["x.jsonl", "x.csv", "x.parquet", "large x.jsonl", "objects"])
def test_columns_that_belong_to_the_prompt_are_all_read(kind, tmp_path, monkeypatch):
    """Also where the instruction is named as the question: no other column is lost."""
    rows = [ALPACA | {"id": "1", "input": "", "system": None, "history": []}, ALPACA | {"id": "2"}]
    if kind.startswith("large"):
        monkeypatch.setattr(json_lines, "LARGE", 1)
    data = tmp_path / kind.removeprefix("large ")
    if kind == "x.parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    elif kind == "x.csv":
        with data.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows([row | {"history": json.dumps(row["history"])} for row in rows])
    else:
        write_lines(data, rows)
    names = [rows] if kind == "objects" else [data, f"{data}?question=instruction"]
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read = read_comparisons(rows) if kind == "objects" else list(open_comparisons(name))
        plain, whole = read
        assert plain == Comparison(id="1", question="Translate.", **PAIR)
        assert whole == Comparison(id="2", prompt=MESSAGES, **PAIR)
    bad = ALPACA | {"history": [["cat?"]]}
    with pytest.raises(
        DataError, match=r"position 0: field 'history\[0\]': expected a question and an answer"
    ):
        read_comparisons([bad])


@pytest.mark.parametrize("name", PROMPT_COLUMNS)
def test_a_part_of_a_prompt_beside_a_prompt_is_named(name):
    rows = [{"id": i, "question": "q", name: '[["a", "b"]]', **PAIR} for i in "12"]
    (lost,) = told(lambda: read_comparisons(rows))
    assert lost.startswith(
        f"data: '{name}': not read; if it belongs to the prompt, write the whole prompt as"
    )
    assert told(lambda: read_comparisons({"question": "q", name: "", **PAIR})) == []


def test_messages_that_repeat_the_conversation_are_not_named():
    asked, good = MESSAGES[1], {"role": "assistant", "content": "chat"}
    both = {"chosen": [asked, good], "rejected": [asked, good | {"content": "chien"}]}
    said = [
        {"messages": [asked, good], **both},
        {"messages": [asked], "question": "cat?", **PAIR},
        {"messages": [asked], "prompt": [asked], "chosen": "c", "rejected": "d"},
    ]
    assert told(lambda: read_comparisons(said)) == []
    (lost,) = told(lambda: read_comparisons([{"messages": [MESSAGES[0], asked, good], **both}]))
    assert lost.startswith("data: 'messages': not read")


@pytest.mark.parametrize("kind", ["objects", "x.jsonl", "x.parquet"])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"score_chosen": 1, "score_rejected": 5.5},
            "'score_chosen' is 1 and 'score_rejected' is 5.5: 'rejected' is",
        ),
        ({"chosen-rating": "2", "rejected-rating": "10"}, "'chosen-rating' is 2 and 'rejected-rating' is 10"),
        ({"margin": -3.0}, "'margin' is -3: 'rejected' is then the better response"),
        ({"chosen_reasoning": "Hot."}, "'chosen_reasoning': not read, so no model sees it"),
        ({"reasoning_content": "Hot."}, "'reasoning_content': not read, so no model sees it"),
    ],
)
def test_columns_that_say_something_else_than_the_record_are_told_once(more, message, kind, tmp_path):
    """Sides that seem exchanged, and parts of responses outside of them."""
    rows = [{"id": i, "question": "q", **PAIR, **more} for i in "12"]
    if kind == "x.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / kind)
    else:
        write_lines(tmp_path / kind, rows)
    (lost,) = told(lambda: read_comparisons(rows if kind == "objects" else tmp_path / kind))
    assert message in lost, lost
    right = {"score_chosen": 5, "score_rejected": 5, "chosen_score": None, "rejected_score": 1}
    assert told(lambda: read_comparisons({"question": "q", **PAIR, **right})) == []


def test_the_name_of_the_winner_is_no_response():
    rows = [{"question": "q", "responses": ["a", "b"], "winner": name} for name in ("a", "model_b", "tie")]
    assert not [text for text in told(lambda: read_comparisons(rows)) if "winner" in text]
    (lost,) = told(lambda: read_comparisons({"question": "q", "winner": "A long answer.", "rejected": "b"}))
    assert "chosen=winner" in lost


def test_messages_in_text_of_json_are_messages():
    turns = {
        name: [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": name}] for name in PAIR
    }
    as_text = {name: json.dumps(said) for name, said in turns.items()}
    expected = Comparison(id="1", question="Tea?", chosen="chosen", rejected="rejected")
    assert read_comparisons({"id": "1", **as_text}) == [expected]
    assert read_comparisons({"id": "1", "prompt": json.dumps(turns["chosen"][:1]), **as_text}) == [expected]
    several = {"id": "1", "responses": list(as_text.values()), "labels": [1, 0]}
    assert read_comparisons(several) == [expected]
    # An answer of JSON beside a plain one is a text.
    (read,) = read_comparisons({"question": "q", **PAIR, "chosen": as_text["chosen"]})
    assert read.responses == (as_text["chosen"], "b")


ASKED, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "Tea?"), ("assistant", "Green."), ("assistant", "None."))
)
CALL = {"type": "function", "function": {"name": "kettle", "arguments": {"cups": 1}}}
CALLED = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "hot"},
]


@pytest.mark.parametrize(
    ("row", "same"),
    [
        (
            {
                "conversations": [{"from": "human", "value": "Tea?"}],
                "chosen": {"from": "gpt", "value": "Green."},
                "rejected": {"from": "gpt", "value": "None."},
            },
            {"question": "Tea?"},
        ),
        (
            {
                "system": "Be brief.",
                "tools": json.dumps([{"name": "kettle"}]),
                "conversations": [
                    {"from": "human", "value": "Tea?"},
                    {"from": "function_call", "value": json.dumps(CALL["function"])},
                    {"from": "observation", "value": "hot"},
                ],
                "chosen": {"from": "gpt", "value": "Green."},
                "rejected": {"from": "gpt", "value": "None."},
            },
            {"prompt": [MESSAGES[0], *CALLED], "tools": [{"name": "kettle"}]},
        ),
        ({"messages": [*CALLED, GOOD], "rejected_response": "None."}, {"prompt": CALLED}),
        ({"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD]}, {"question": "Tea?"}),
        ({"context_messages": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, {"question": "Tea?"}),
        (
            {"winner": "model_b", "conversation_a": [ASKED, BAD], "conversation_b": [ASKED, GOOD]},
            {"question": "Tea?"},
        ),
        (
            {
                "chosen": "\n\nHuman: Tea?\n\nAssistant: Green.",
                "rejected": "\n\nHuman: Tea?\n\nAssistant: None.",
            },
            {"question": "Tea?"},
        ),
        (
            {"chosen": "Human: Tea?\n\nAssistant: Green.", "rejected": " Human: Tea?\n\nAssistant: None."},
            {"question": "Tea?"},
        ),
        ({"prompt": "Tea?", "chosen": GOOD, "rejected": BAD}, {"question": "Tea?"}),
    ],
)
def test_layouts_of_other_tools_are_read(row, same, tmp_path):
    """ShareGPT, ms-swift, OpenRLHF, Chatbot Arena, raw text of HH, and single messages."""
    expected = Comparison(id="1", chosen="Green.", rejected="None.", **same)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_comparisons([row | {"id": "1"}]) == [expected]
        assert read_comparisons(write_lines(tmp_path / "x.jsonl", [row | {"id": "1"}])) == [expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"winner": "tie", "conversation_a": [ASKED, BAD], "conversation_b": [ASKED, GOOD]}, "'winner': 'tie' prefers"),
        ({"text_chosen": "<s>a", "text_rejected": "<s>b"}, "'text_chosen': contains a whole conversation"),
        ({"conversations": [{"from": "bot", "value": "a"}], **PAIR}, r"'conversations\[0\]\.from': expected one of"),
        ({"conversations": "a", **PAIR}, "'conversations': expected a list"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], **PAIR},
            r"'conversations\[1\]': is an answer; expected the conversation before",
        ),
        (
            {"messages": [ASKED, GOOD], "rejected_response": "b", "rejected_messages": [ASKED, BAD]},
            "'rejected_response': given beside 'rejected_messages'",
        ),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"}, "'rejected': exp"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_read_are_named(row, message):
    with pytest.raises(DataError, match=f"^position 0: field {message}"):
        read_comparisons([row])


@pytest.mark.parametrize(
    "start", ["Tea? ", "<|im_start|>user\nTea?<|im_end|>\n<|im_start|>assistant\n", "Human: Tea? "]
)
def test_texts_with_an_implicit_prompt_are_read_as_the_error_says(start, tmp_path):
    """TRL's implicit prompt, as text; nothing else of the record is lost."""
    row = {"id": "1", "chosen": f"{start}Green.", "rejected": f"{start}None.", "user_id": "u", "margin": 2.0}
    data = write_lines(tmp_path / "x.jsonl", [row])
    with pytest.raises(DataError, match=r"x.jsonl:1: field 'question': missing; .* ends in '\?rendered'"):
        read_comparisons(data)
    (read,) = read_comparisons(f"{data}?rendered")
    assert read.responses == (row["chosen"], row["rejected"])
    assert (read.user_id, read.margin, read.question) == ("u", 2.0, "")
    assert is_rendered(read.prompt)


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    rows = [{"id": "1", "prompt": [ASKED], "chosen": [GOOD], "rejected": [CALLED[1]]}]
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "two")
    expected = [Comparison.from_row(rows[0], where="f:1")]
    for folder in ("one", "two"):
        assert read_comparisons(tmp_path / folder, split="test") == expected
        assert describe_source(tmp_path / folder)["kind"] == "saved"
    with pytest.raises(DataError, match="two: no split 'dev'; it has train, test"):
        read_comparisons(tmp_path / "two", split="dev")


def test_the_shared_layouts():
    cases = Path(__file__).resolve().parents[3] / "shared" / "data" / "cases"
    if not cases.is_dir():
        pytest.skip(f"no data at {cases}")
    read = {
        name: read_comparisons(cases / f"{name}.jsonl")[0]
        for name in ("alpaca_columns", "hh_raw_text", "sharegpt")
    }
    (alpaca, hh, sharegpt) = ([(turn.role, turn.content) for turn in one.prompt] for one in read.values())
    assert alpaca == [
        ("system", "Be brief."), ("user", "cat?"), ("assistant", "chat"), ("user", "Translate to French\ndog"),
    ]  # fmt: skip
    assert hh == [("user", "Which fruit is red?"), ("assistant", "Many are."), ("user", "Name one.")]
    assert sharegpt == [("user", "Tea or coffee?")]
    assert [one.responses for one in read.values()] == [
        ("chien", "loup"),
        ("A cherry.", "No."),
        ("Tea.", "Coffee."),
    ]
