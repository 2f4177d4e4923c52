import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import file_digest
from prb_jax.records.intake import describe_source, read_comparisons
from prb_jax.records.sources import personas
from tests.json_lines import write_lines
from tests.sweeps import sweep

ROWS = [
    {"id": i, "question": f"q{i}", "chosen": "a", "rejected": "b", "subset": "even" if i % 2 == 0 else "odd"}
    for i in range(6)
]


@pytest.fixture
def file(tmp_path):
    """A file of the rows; other ones can be written into it."""
    path = tmp_path / "x.jsonl"
    write_lines(path, ROWS)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", "x.parquet"])
def test_every_kind_of_file_gives_the_same_comparisons(tmp_path, name):
    path = tmp_path / name
    rows = [row | {"profile": [{"id": "p", "category": "c", "text": "t"}], "meta": {"x": 1}} for row in ROWS]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_lines(path, rows)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    expected = [Comparison.from_row(row, where="x") for row in rows]
    assert read_comparisons(path) == read_comparisons(str(path)) == expected


def test_parquet_with_pairs_and_lists_mixed(tmp_path):
    rows = [ROWS[0], {"id": 9, "prompt": "q", "responses": ["a", "b", "c"], "labels": [0, 1, 0]}]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([{**dict.fromkeys(rows[0] | rows[1]), **row} for row in rows]), path)
    assert [c.labels for c in read_comparisons(path)] == [(1.0, 0.0), (0.0, 1.0, 0.0)]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("chosen", [1, 2], r"row 1: field 'chosen': expected a string, found 1 \(int\)"),
        ("rejected", [b"a", b"b"], r"row 1: field 'rejected': expected a string, found b'a' \(bytes\)"),
        ("question", ["q", None], "row 2: field 'question': missing"),
        ("profile", [1, 2], r"row 1: field 'profile': expected a list, found 1 \(int\)"),
        ("profile", [[{"text": "t"}], [{"text": None}]], r"row 2: field 'profile\[0\]\.text': missing"),
        ("margin", [0.5, float("nan")], "row 2: field 'margin': expected a finite number, found nan"),
        ("id", [1.5, 2.5], r"row 1: field 'id': expected a string, found 1\.5 \(float\)"),
    ],
)
def test_parquet_with_wrong_columns(tmp_path, column, values, message):
    columns = {"id": ["1", "2"], "question": ["q", "q"], "chosen": ["a", "a"], "rejected": ["b", "b"]}
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns | {column: values}), path)
    with pytest.raises(DataError, match=f"x.parquet: {message}"):
        read_comparisons(path)


def test_a_bad_field_names_file_and_line(file):
    write_lines(file, [*ROWS, {"id": "9", "question": "q", "chosen": 3, "rejected": "b"}])
    with pytest.raises(DataError) as caught:
        read_comparisons(file)
    assert str(caught.value) == f"{file}:7: field 'chosen': expected a string, found 3 (int)"


def test_duplicate_ids_name_both_lines(file):
    write_lines(file, [*ROWS, ROWS[1] | {"id": "1"}])  # the number 1 is the id "1"
    with pytest.raises(DataError) as caught:
        read_comparisons(file)
    assert str(caught.value) == f"{file}:7: field 'id': '1' was already used at {file}:2"
    with pytest.raises(DataError, match="already used"):
        read_comparisons(file, subset="even")


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xef\xbb\xbf"])
def test_empty_files(tmp_path, content):
    for name, data in {
        "x.jsonl": content,
        "x.json": content,
        "array.json": b"[]",
        "x.jsonl.gz": gzip.compress(content),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name}: no comparisons in it"):
            read_comparisons(tmp_path / name)


def test_limit_and_subset(file):
    rows = [*ROWS, {"id": 9, "question": "q", "chosen": "a", "rejected": "b"}]
    write_lines(file, [*rows, "not a record"])
    assert [c.id for c in read_comparisons(file, limit=2)] == ["0", "1"]
    assert [c.id for c in read_comparisons(file, limit=2, subset="odd")] == ["1", "3"]
    with pytest.raises(DataError, match=":8: expected an object"):
        read_comparisons(file, limit=8)
    with pytest.raises(DataError, match="limit: expected at least 1, found 0"):
        read_comparisons(file, limit=0)
    write_lines(file, rows)
    assert [c.id for c in read_comparisons(file, subset="even")] == ["0", "2", "4"]
    with pytest.raises(DataError, match=r"no subset 'Even'; expected one of \(none\), even, odd"):
        read_comparisons(file, subset="Even")


@pytest.mark.parametrize("read", [read_comparisons, describe_source])
def test_no_such_source(tmp_path, read):
    for source in ("nothing", tmp_path / "nothing"):
        with pytest.raises(DataError, match="nothing: no such file, folder or data set"):
            read(source)
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
        read(tmp_path / "nothing.jsonl")


def test_description_follows_the_contents(file, tmp_path):
    described = describe_source(file)
    assert described == {"kind": "file", "files": {"x.jsonl": file_digest(file)}}
    assert json.loads(json.dumps(described)) == described
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert describe_source(file.rename(moved / "x.jsonl")) == described
    write_lines(moved / "x.jsonl", ROWS[1:])
    assert describe_source(moved / "x.jsonl") != described
    for use in (describe_source, read_comparisons, file_digest):
        with pytest.raises(DataError, match=r"x\.jsonl: no such file"):
            use(file)


def test_hub_sources_are_described_without_a_network():
    described = {"kind": "hub", "repository": "QiyaoMa/Personalized-RewardBench", "split": "test"}
    assert describe_source("prb") == described
    assert describe_source("QiyaoMa/Personalized-RewardBench") == described


def test_the_generated_benchmark_by_name(monkeypatch):
    asked = []

    def load(part="test"):
        asked.append(part)
        return [Comparison.from_row(row, where="x") for row in ROWS]

    monkeypatch.setattr(personas, "load", load)
    assert len(read_comparisons("personas")) == 6
    assert len(read_comparisons("personas:train", subset="odd", limit=2)) == 2
    assert len(read_comparisons("personas", split="all")) == 6
    assert asked == ["test", "train", "all"]
    assert describe_source("personas:train") == {"kind": "generated", "name": "personas", "part": "train"}


@pytest.mark.parametrize(
    ("name", "rows", "users"),
    sweep(
        [
            ("personalised/polis_en", 16_953, 3_229),
            ("personalised/ukpconvarg1", 6_270, 749),
            ("personalised/prefeval", 3_000, 1_000),
            ("generic/llmbar", 1_200, 0),
            ("generic/rm_bench", 798, 0),
            ("generic/ukpconvarg1_all_judgements", 65_340, 3_801),
        ],
        few=(1, 2, 3, 4),
    ),
)
def test_real_files_read_whole(name, rows, users, real):
    comparisons = read_comparisons(real(name))
    assert len(comparisons) == rows
    assert len({c.user_id for c in comparisons} - {None}) == users
    assert all(c.is_pair for c in comparisons)
    if users and name.startswith("personalised"):
        assert all(c.profile for c in comparisons)
