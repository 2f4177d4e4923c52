"""Columns with other names than the fields of a record: told, or mapped."""

import contextlib
import csv
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prb_jax.errors import DataError, PrbWarning
from prb_jax.records import lines as json_lines
from prb_jax.records.field_names import nearest_field
from prb_jax.records.sources.reading import describe_source, open_comparisons, read_comparisons, source_rows
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
        told_of = f"{name!r} is no field of a record and is not read; to read it as {field!r}"
        assert f"{told_of}, end the name of the data in '?{field}={name}' (" in text
        assert f"--columns {field}={name} " in text


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
        ("uid=user", "columns: 'uid' is no field; expected FIELD=COLUMN with a field of a record: id, quest"),
        ("user_id=id", "columns: user_id=id: 'id' is a field of a record by itself"),
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
    with pytest.raises(DataError, match="can be mapped in files, folders and data sets of the hub alone"):
        read_comparisons("personas:test-seen?user_id=user")


def test_a_file_may_have_a_question_mark_in_its_name(tmp_path):
    path = write_lines(tmp_path / "x?user_id=user.jsonl", ROWS[:1])
    with pytest.warns(PrbWarning):
        assert len(read_comparisons(path)) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user", "user_id"), ("userid", "user_id"), ("User-ID", "user_id"), ("annotator_id", "user_id"),
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
REMEDY = "write the whole prompt as 'prompt', a list of {role, content}"


def told(read):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(DataError):
            read()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("kind", ["x.jsonl", "x.csv", "x.parquet", "large x.jsonl", "objects"])
def test_columns_that_belong_to_the_prompt_are_not_lost_without_a_word(kind, tmp_path, monkeypatch):
    """In the hint that would lose them, and where they are lost: once, also if the first record has none."""
    rows = [ALPACA | {"id": "1", "input": "", "system": None, "history": []}, ALPACA | {"id": "2"}]
    rows += [ALPACA | {"id": "3"}]
    if kind.startswith("large"):
        monkeypatch.setattr(json_lines, "LARGE", 1)
    data = tmp_path / kind.removeprefix("large ")
    if kind == "x.parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    elif kind == "x.csv":
        with data.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows([row | {"history": row["history"] and "cat?"} for row in rows])
    else:
        write_lines(data, rows)
    (hint,) = told(lambda: read_comparisons(rows if kind == "objects" else data))
    assert "'instruction' is no field of a record and is not read; to read it as 'question'" in hint
    assert hint.endswith(f"; without 'system', 'input' and 'history', which belong to the prompt: {REMEDY}")
    if kind == "objects":
        return
    (lost,) = told(lambda: list(open_comparisons(f"{data}?question=instruction")))
    assert (
        lost
        == f"{data}: 'system', 'input' and 'history': not read, though the prompt goes on there: {REMEDY}"
    )
    assert told(lambda: read_comparisons(f"{data}?question=instruction&category=system")) != [lost]


def test_which_columns_belong_to_the_prompt():
    pair = {"question": "q", **PAIR}
    (lost,) = told(lambda: read_comparisons(pair | {"system": "Be brief.", "input": "x"}))
    assert lost.startswith("data: 'system': not read")
    assert told(lambda: read_comparisons(pair | {"system": "", "input": "x"})) == []
    (hint,) = told(lambda: read_comparisons(pair | {"history": ["x"]}))
    assert "to read it as 'profile'" in hint
    alone = {name: ALPACA[name] for name in ("instruction", "chosen", "rejected")}
    (hint,) = told(lambda: read_comparisons(alone))
    assert hint.endswith("does the same)")


def test_the_shared_columns():
    cases = Path(__file__).resolve().parents[3] / "shared" / "data" / "cases" / "alpaca_columns.jsonl"
    if not cases.is_file():
        pytest.skip(f"no columns at {cases}")
    for data, begins in (
        (cases, "'instruction' is no"),
        (f"{cases}?question=instruction", "'system', 'input' and 'h"),
    ):
        (text,) = told(lambda data=data: read_comparisons(data))
        assert text.startswith(f"{cases}: {begins}")
        assert text.endswith(REMEDY)
