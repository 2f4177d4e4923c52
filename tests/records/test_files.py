"""Rows of files of every kind, each with its place; whatever is wrong is one error that names it."""

import csv
import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison, Post
from prb_jax.records.files import file_digest, read_rows

ROWS = [
    {"id": str(i), "question": f"q{i} é", "chosen": "a", "rejected": "b", "extra": {"deep": [i]}}
    for i in range(5)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
SEPARATORS = {"id": "1", "question": "a\u2028b\x85c"}  # of Unicode, which end no line


def write(path, content: bytes):
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def values(path):
    return [row.value for row in read_rows(path)]


def refused(path):
    with pytest.raises(DataError) as caught:
        values(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", "x.json.gz"])
@pytest.mark.parametrize(
    ("content", "expected", "lines"),
    [
        (LINES, ROWS, [1, 2, 3, 4, 5]),
        (LINES.rstrip(b"\n"), ROWS, [1, 2, 3, 4, 5]),
        (b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n") + b"  \n", ROWS, [1, 3, 5, 7, 9]),
        (json.dumps(SEPARATORS, ensure_ascii=False).encode(), [SEPARATORS], [1]),
    ],
)
def test_json_lines(tmp_path, name, content, expected, lines):
    path = write(tmp_path / name, content)
    assert values(path) == expected
    assert [row.where for row in read_rows(path)] == [f"{path}:{n}" for n in lines]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_json_array_keeps_line_numbers(tmp_path, name, indent):
    text = "\ufeff\n" + json.dumps(ROWS, indent=indent)
    path = write(tmp_path / name, text.encode())
    assert values(path) == ROWS
    lines = [int(row.where.rsplit(":", 1)[1]) for row in read_rows(path)]
    starts = [n for n, line in enumerate(text.split("\n"), 1) if line.startswith("  {")]
    assert lines == (starts or [2] * 5)


def test_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    first, *others = [{k: v for k, v in row.items() if k != "extra"} for row in ROWS]
    assert values(path) == [
        first | {"extra": None},
        *others,
    ]  # an error about the first row lists all columns
    assert next(row.where for row in read_rows(path)) == f"{path}: row 1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "3", "question"', "x.jsonl:3: malformed JSON at column 23: "),
        (b"{'id': 3}", "x.jsonl:3: malformed JSON at column 2: "),
        (b'{"id": 1} {"id": 2}', "x.jsonl:3: malformed JSON at column 11: text after the end"),
        (b'{"id": "a", "id": "b"}', "x.jsonl:3: malformed JSON: field 'id' is given twice"),
        (b'{"id": ' + b"9" * 5000 + b"}", "x.jsonl:3: malformed JSON: "),
        (b"[" * 100_000, "x.jsonl:3: malformed JSON: nested too deeply"),
        (b'{"id": "\xff"}', "x.jsonl:3: invalid UTF-8: byte 0xff at column 9"),
        ('{"id": "é"}'.encode("latin-1"), "x.jsonl:3: invalid UTF-8: byte 0xe9 at column 9"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bad_lines_are_named(tmp_path, line, message, suffix):
    good = LINES.splitlines(keepends=True)
    path = write(tmp_path / f"x.jsonl{suffix}", b"".join([*good[:2], line, b"\n", *good[2:]]))
    assert refused(path).startswith(f"{path.parent}/{message}".replace("x.jsonl", path.name))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'[\n{"id": 1},\n{"id": }\n]', ":3: malformed JSON at column 8"),
        ("x.json", b'[\n{"id": 1}\n{"id": 2}]', ":3: malformed JSON at column 1: expected ',' or ']'"),
        ("x.json", b'[\n{"id": 1},\n', ":3: malformed JSON at column 1"),
        ("x.json", b'[{"id": 1}]\n\n{"id": 2}', ":3: malformed JSON: text after the end of the array"),
        ("x.json", b'[{"id": 1},,{"id": 2}]', ":1: malformed JSON at column 12"),
        ("x.json", b'[\n{"id": 1},\n{"id": "\xff"}]', ":3: invalid UTF-8: byte 0xff"),
        ("x.csv", b"id,question\n1,q\n2\n", ":3: expected 2 cells, one for each column, found 1"),
        ("x.csv", b"id,question,id\n", ":1: field 'id' is given twice"),
        ("x.csv", b"1,q,a,b\n", ":1: names no field of a record: found the columns '1', 'q', 'a', 'b'"),
        ("x.csv", b'id,question\n1,"q\n', ":2: malformed CSV: unexpected end of data"),
        ("x.csv", b'id,labels\n1,"[1, 0"\n', ":2: field 'labels': expected JSON"),
        ("x.csv", b"id,profile\n1,\"[{'text': 't'}]\"\n", ":2: field 'profile': expected JSON"),
        ("x.tsv", b"id\tquestion", ": unknown kind of file; expected a name ending in .jsonl"),
        ("x.jsonl", gzip.compress(LINES), ":1: invalid UTF-8: byte 0x8b at column 2 (invalid start byte); the file "
         "looks gzipped, but is not named .gz"),
        ("x.parquet", b"text, not parquet", ": not a whole parquet file"),
        ("x.parquet", b"", ": not a whole parquet file"),
    ],
)  # fmt: skip
def test_bad_contents_are_named(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    assert refused(path).startswith(f"{path}{message}")


def test_what_is_no_whole_file(tmp_path):
    for name in ("x.jsonl", "x.jsonl.gz", "x.json", "x.parquet"):
        assert refused(tmp_path / name) == f"{tmp_path / name}: no such file"
    with pytest.raises(DataError, match=r"x\.jsonl: no such file"):
        file_digest(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").mkdir()
    assert "x.jsonl: cannot be read: Is a directory" in refused(tmp_path / "x.jsonl")
    whole = gzip.compress(LINES * 500, mtime=0)
    damaged = bytearray(whole)
    damaged[60:120] = bytes(60)
    for name in ("x.jsonl.gz", "x.json.gz"):
        for content, message in (
            (whole[: len(whole) // 2], "truncated; the gzip stream ends too early"),
            (LINES, "damaged, or not gzip as its name says"),
            (damaged, ""),
        ):
            (tmp_path / name).write_bytes(content)
            assert refused(tmp_path / name).startswith(f"{tmp_path / name}: {message}")
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refused(path).startswith(f"{path}: not a whole parquet file")


def test_bad_fields_of_parquet_are_named(tmp_path):
    path = tmp_path / "x.parquet"
    good, bad = pa.array(["a", "b", "c"]), pa.array([b"a", b"\xff\xfe", b"c"], pa.binary())
    pq.write_table(pa.table({"id": good, "chosen": bad.view(pa.string())}), path)
    assert refused(path).startswith(f"{path}: row 2: field 'chosen': invalid UTF-8")
    pq.write_table(pa.table([["1"], ["q"], ["2"]], names=["id", "question", "id"]), path)
    assert refused(path) == f"{path}: field 'id' is given twice, in columns 1 and 3"
    twice = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(pa.table({"id": ["1"], "profile": pa.ListArray.from_arrays([0, 1], twice)}), path)
    assert refused(path).startswith(f"{path}: row 1: field 'profile': ")
    assert "duplicate field names" in refused(path)


def test_digest_is_that_of_the_bytes(tmp_path):
    path = write(tmp_path / "x.jsonl", LINES)
    assert file_digest(path) == file_digest(str(path)) == f"sha256:{hashlib.sha256(LINES).hexdigest()}"


@given(st.binary(max_size=40), st.sampled_from([b"", b"[", b'{"id": 1}\n', b'[{"id": 1}']))
def test_any_bytes_are_rows_or_a_data_error(tmp_path_factory, content, start):
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("x.jsonl", "x.json"):
        (folder / name).write_bytes(start + content)
        try:
            values(folder / name)
        except DataError as error:
            assert str(error).startswith(f"{folder / name}:")  # noqa: PT017


CSV = """id,question,chosen,rejected,margin,profile,note
1,"Tea, or
coffee?",Tea.,Coffee.,0.5,"[{""id"": 1, ""text"": ""I like tea""}]",x

2,q,[{a},b,,,
"""


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_csv(tmp_path, name):
    content = b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode()
    path = write(tmp_path / name, content)
    rows = list(read_rows(path))
    assert [row.where for row in rows] == [f"{path}:2", f"{path}:5"]
    first = Comparison.from_row(rows[0].value, where="x")
    assert (first.question, first.margin) == ("Tea, or\r\ncoffee?", 0.5)
    assert first.profile == (Post("1", "I like tea"),)
    assert Comparison.from_row(rows[1].value, where="x").responses == ("[{a}", "b")


def test_csv_with_lists_and_conversations(tmp_path):
    path = tmp_path / "x.csv"
    turns = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in "ab"]
    rows = [
        ["prompt", "chosen", "rejected", "responses", "labels"],
        ["q", "", "", json.dumps(["a" * 200_000, "b"]), "[0, 1]"],
        ["", *map(json.dumps, turns), "", ""],
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    first, second = (Comparison.from_row(row.value, where=row.where) for row in read_rows(path))
    assert (len(first.responses[0]), first.labels) == (200_000, (0.0, 1.0))
    assert second == Comparison(question="q", chosen="a", rejected="b")
