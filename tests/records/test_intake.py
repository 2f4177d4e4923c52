"""What Python callers pass: objects, tables, generators; records without an id."""

import json

import datasets
import pyarrow as pa
import pytest

from prb_jax.errors import DataError, PrbWarning
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import as_comparisons, read_comparisons

ROWS = [
    {
        "id": f"r{i}", "question": f"q{i}", "chosen": "a", "rejected": "b", "subset": "xy"[i % 2], "other": 1,
        "profile": [{"id": "p", "category": "c", "text": f"post {i}"}],
    }
    for i in range(4)
]  # fmt: skip
EXPECTED = [Comparison.from_row(row, where="x") for row in ROWS]


class OnlyArrow:
    """A table that has nothing but the Arrow C stream interface."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def table():
    return pa.Table.from_pylist(ROWS)


NOT_UTF8 = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
GIVEN = {
    "dicts": lambda: ROWS,
    "tuple": lambda: tuple(ROWS),
    "generator": lambda: (row for row in ROWS),
    "comparisons": lambda: iter(EXPECTED),
    "mixed": lambda: [ROWS[0], *EXPECTED[1:]],
    "Dataset": lambda: datasets.Dataset.from_list(ROWS),
    "Dataset in another order": lambda: datasets.Dataset.from_list(ROWS[::-1]).select([3, 2, 1, 0]),
    "IterableDataset": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "pyarrow": table,
    "any table": lambda: OnlyArrow(table()),
    "text views": lambda: OnlyArrow(table().set_column(1, "question", table()["question"].cast(pa.string_view()))),
    "pandas": lambda: pytest.importorskip("pandas").DataFrame(ROWS),
    "polars": lambda: pytest.importorskip("polars").DataFrame(ROWS),
}  # fmt: skip


@pytest.mark.parametrize("kind", GIVEN)
def test_every_kind_gives_the_same_comparisons(kind):
    assert read_comparisons(GIVEN[kind]()) == EXPECTED


def test_one_record_alone_a_subset_and_a_limit():
    assert read_comparisons(ROWS[0]) == read_comparisons(EXPECTED[0]) == EXPECTED[:1]
    assert [c.id for c in read_comparisons(table(), subset="y")] == ["r1", "r3"]

    def endless():
        while True:
            yield from EXPECTED

    assert read_comparisons(endless(), limit=1) == EXPECTED[:1]


def test_lists_of_python_may_be_any_iterable():
    row = {"id": 1, "question": "q", "responses": ("a", "b"), "labels": iter([1, 0]), "profile": ()}
    assert as_comparisons([row])[0].labels == (1.0, 0.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data: expected comparisons, or a table of records, found int"),
        ([ROWS[0], 7], "position 1: expected a Comparison or an object with its fields, found int"),
        ([ROWS[0], ROWS[1] | {"chosen": 1}], "position 1: field 'chosen': expected a string, found 1"),
        ([ROWS[0], ROWS[0]], "position 1: field 'id': 'r0' was already used at position 0"),
        (pa.table([["1"], ["q"], ["2"]], names=["id", "question", "id"]), "data: field 'id' .* columns 1 and 3"),
        (pa.table({"id": ["1"], "question": ["q"]}), "position 0: field 'chosen': missing"),
        (pa.table({"id": ["1", "2"], "chosen": NOT_UTF8}), "data: row 2: field 'chosen': invalid UTF-8"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "expected one split .*: train"),
        ([], "data: no comparisons in it"),
    ],
)  # fmt: skip
def test_what_is_no_data(data, message):
    with pytest.raises(DataError, match=message):
        read_comparisons(data)


def test_without_an_id_the_contents_are_it():
    plain = {"question": "q", "chosen": "a", "rejected": "b"}
    one, other, again, last = read_comparisons([plain, plain | {"rejected": "c"}, dict(plain), dict(plain)])
    assert one.id == Comparison(**plain).id
    assert len(one.id) == 16
    assert int(one.id, 16)
    assert other.id != one.id
    assert [again.id, last.id] == [f"{one.id}#2", f"{one.id}#3"]
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    spelled = {"chosen": conversation, "rejected": [conversation[0], {"role": "assistant", "content": "b"}]}
    assert read_comparisons(spelled)[0].id == one.id
    with_posts = plain | {"profile": [{"text": "t"}]}
    assert Comparison(**with_posts).id != one.id


def test_one_response_can_be_scored_but_not_evaluated():
    row = {"question": "q", "responses": ["a"]}
    assert Comparison(**row).responses == ("a",)
    assert as_comparisons(row, labelled=False)[0].labels is None
    with pytest.raises(
        DataError, match="position 0: field 'responses': expected at least 2 responses, found 1"
    ):
        read_comparisons(row)
    for more, count in (({"labels": [1]}, 1), ({"responses": []}, 0)):
        with pytest.raises(
            DataError, match=f"field 'responses': expected at least 2 responses, found {count}"
        ):
            Comparison(**row | more)


def test_equal_records_without_an_id_are_counted_and_told():
    rows = [{"question": question, "chosen": "a", "rejected": "b"} for question in "qqqrsq"]
    with pytest.warns(PrbWarning, match=r"^3 of 6 records without an id are equal to an earlier one.*#2\)"):
        assert len(as_comparisons(rows)) == 6


@pytest.mark.parametrize("other", ["Jose\u0301", "Jos\u00e9 ", " Jos\u00e9"])
def test_names_of_users_that_look_alike_are_told(other):
    rows = [ROWS[i] | {"user_id": user} for i, user in enumerate(["Jos\u00e9", other, "ann", "Ann"])]
    told = r"'user_id': 2 names .* counted as 2 users, not 1: 'Jos\\xe9' \(position 0\)"
    with pytest.warns(PrbWarning, match=told):
        assert len({comparison.user_id for comparison in as_comparisons(rows)}) == 4


@pytest.mark.parametrize("name", ["nan", "None", "NULL"])
def test_a_missing_user_that_became_text_is_told(name):
    rows = [ROWS[0] | {"user_id": name}, ROWS[1] | {"user_id": "Nancy"}]
    told = f"position 0: field 'user_id': '{name}' looks like a missing value"
    with pytest.warns(PrbWarning, match=told) as warned:
        as_comparisons(rows)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "opening",
    ["[{'role': 'user', 'content': ", "[ {'from': 'human', 'value': ", "{'role': 'user', 'content': "],
)
@pytest.mark.parametrize("name", ["prompt", "question", "chosen", "rejected"])
def test_messages_as_python_prints_them_are_refused(name, opening):
    row = {"question": "q", "chosen": "a", "rejected": "b"} | {name: opening + "'t'}]"}
    row = {key: value for key, value in row.items() if (key, name) != ("question", "prompt")}
    with pytest.raises(
        DataError, match=f"position 0: field '{name}': a list of messages as Python prints it"
    ):
        as_comparisons([row])


def test_messages_as_python_prints_them_are_refused_in_a_file_too(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("id,question,chosen,rejected\n1,q,\"[{'role': 'user'}]\",b\n")
    with pytest.raises(DataError, match=r"x\.csv:2: field 'chosen': a list of messages as Python prints"):
        read_comparisons(path)


def test_a_text_that_only_begins_with_printed_messages_is_a_text():
    prompt = "[{'role': 'user', 'content': 't'}] is refused by my server. Why?"
    (one,) = as_comparisons([{"question": prompt, "chosen": "a", "rejected": "b"}])
    assert one.question == prompt


def test_a_single_message_as_json_is_a_message():
    sides = {name: json.dumps({"role": "assistant", "content": name}) for name in ("chosen", "rejected")}
    (read,) = as_comparisons([{"question": "q"} | sides])
    assert [str(response) for response in read.responses] == ["chosen", "rejected"]


def test_a_table_with_two_columns_of_a_name_is_refused():
    frame = pytest.importorskip("pandas").DataFrame(
        [["q", "q", "a", "b"]], columns=["question", "question", "chosen", "rejected"]
    )
    with pytest.raises(DataError, match="data: not a table of records: Duplicate column names found"):
        as_comparisons(frame)
