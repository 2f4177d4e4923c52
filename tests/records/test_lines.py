"""Large files of lines: the records of a file whatever its blocks, each byte read once."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from prb_jax.errors import DataError
from prb_jax.records import csv_files, files, large_lines, other_files
from prb_jax.records.files import read_rows
from prb_jax.records.large_lines import JsonLines
from tests.sweeps import sweep

ODD = b'\xef\xbb\xbf\n  \r\n{"a": 1}\n\n\xc2\xa0\xe3\x80\x80\n {"b": "\xe3\x80\x80"}\r\n\n'
LONG = b'{"d": "' + "länger ".encode() * 30 + b'"}'
CONTENTS = {
    "nothing": b"",
    "blank lines alone": b"\n \n\xe2\x80\x83\n",
    "no last line end": ODD + b'{"c": 3}',
    "blank at the end": ODD + b'{"c": 3}\n   ',
    "long lines": ODD + LONG + b"\n" + ODD.replace(b"\xef\xbb\xbf", b"") + b'{"e": 5}\n',
    "one long line": LONG,
}


def values(rows: Any) -> list[tuple[str, Any]]:
    return [(row.where, row.value) for row in rows]


def write(path: Path, contents: bytes) -> Path:
    packed = path.name.endswith(".gz")
    half = len(contents) // 2
    path.write_bytes(gzip.compress(contents[:half]) + gzip.compress(contents[half:]) if packed else contents)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("block", [1, 3, 16, 50, 1 << 20])
def test_any_blocks_give_the_records_of_the_file(tmp_path, monkeypatch, name, contents, block):
    monkeypatch.setattr(large_lines, "BLOCK", block)
    monkeypatch.setattr(large_lines, "_PIECE", 7)
    path = write(tmp_path / name, CONTENTS[contents])
    texts = enumerate(CONTENTS[contents].decode("utf-8-sig").split("\n"), start=1)
    expected = [(f"{path}:{number}", json.loads(text)) for number, text in texts if text.strip()]
    file = JsonLines(path)
    assert values(file.rows()) == values(file.rows()) == expected
    assert file.complete
    assert file.digest == JsonLines(path).digest == large_lines.large_digest(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_each_byte_is_read_once_and_no_further_than_asked(tmp_path, monkeypatch, name):
    monkeypatch.setattr(large_lines, "BLOCK", 1 << 10)
    monkeypatch.setattr(large_lines, "_PIECE", 1 << 9)
    draw = random.Random(1)
    rows = [{"n": n, "text": draw.randbytes(draw.randrange(90)).hex()} for n in range(500)]
    path = write(tmp_path / name, "".join(json.dumps(row) + "\n" for row in rows).encode())
    size, file = path.stat().st_size, JsonLines(path)
    walk = file.rows()
    assert next(walk).value == rows[0]
    assert file.bytes_read == 1 << 10
    assert not file.complete
    assert [row.value for row in walk] == rows[1:]
    assert file.complete
    assert file.bytes_read == size
    assert next(file.rows()).value == rows[0]  # another one begins anew
    assert file.bytes_read == size + (1 << 10)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_blocks_that_are_not_what_they_were_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(large_lines, "BLOCK", 256)
    text = "".join(json.dumps({"n": n, "text": f"{n * 7919:x}" * 3}) + "\n" for n in range(100))
    path = write(tmp_path / name, text.encode())
    before = JsonLines(path)
    read = list(itertools.islice(before.rows(), 30))
    assert len(read) == 30
    kept = list(before.digests)
    assert 1 < len(kept) < large_lines.block_count(path.stat().st_size)
    same = JsonLines(path)
    same.expect(kept)
    assert len(list(same.rows())) == 100
    other = bytearray(path.read_bytes())
    other[300] ^= 1
    path.write_bytes(other)
    changed = JsonLines(path)
    changed.expect(kept)
    with pytest.raises(DataError, match=r"x.jsonl.*: changed since it was scored \(block 2 of"):
        list(changed.rows())
    late = JsonLines(path)
    with contextlib.suppress(DataError):  # what is packed is damaged now
        list(late.rows())
    with pytest.raises(DataError, match="changed since it was scored"):
        late.expect(kept)
    path.write_bytes(other[:200])
    with pytest.raises(DataError, match="changed since it was scored"):
        JsonLines(path).expect(kept)


def test_a_line_that_changes_and_a_file_that_becomes_shorter_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(large_lines, "BLOCK", 64)
    path = write(tmp_path / "x.jsonl", b"".join(b'{"n": %3d}\n' % n for n in range(100)))
    file = JsonLines(path)
    assert len(list(file.rows())) == file.about() == 100
    contents = path.read_bytes()
    path.write_bytes(contents.replace(b" 50}", b" 51}"))
    walk = file.rows()
    assert [next(walk).value["n"] for _ in range(40)] == list(range(40))
    with pytest.raises(DataError, match=r"x.jsonl: changed while it was being read \(block 9\)"):
        list(walk)
    short = JsonLines(path)
    path.write_bytes(contents[:500])
    with pytest.raises(DataError, match="became shorter while it was being read"):
        list(short.rows())


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json.gz", "x.csv", "x.csv.gz"])
@pytest.mark.parametrize("end", sweep([b"", b'"}\n{"a": 3}\n'], few=(1,)))
def test_a_line_has_a_largest_length(tmp_path, name, end):
    first = b"question\n" if ".csv" in name else b'{"a": 1}\n'
    opened = b'"' if ".csv" in name else b'{"a": "'
    path = write(tmp_path / name, first + opened + bytes(files.LONGEST_LINE).replace(b"\0", b" ") + end)
    rows = read_rows(path, columns=None)
    with pytest.raises(
        DataError, match=rf"{path}:2: expected a record of at most 67,108,864 bytes on a line"
    ):
        list(rows)


def test_a_record_of_many_lines_of_csv_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "LONGEST_LINE", 1000)
    lines_within = b"".join(b'"a\n",' for _ in range(300))
    path = write(tmp_path / "x.csv.gz", b"question,chosen\n1,2\n3,4\n" + lines_within)
    with pytest.raises(DataError, match=rf"{path}:4: expected a record of at most"):
        list(read_rows(path, columns=None))


def test_a_packed_array_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(other_files, "HELD", 1000)
    content = b"[" + b",".join(b'{"a": 1}' for _ in range(300)) + b"]"
    assert len(list(read_rows(write(tmp_path / "x.json", content)))) == 300
    path = write(tmp_path / "x.json.gz", content)
    with pytest.raises(DataError, match=rf"{path}: contains more than 1,000 bytes of JSON"):
        list(read_rows(path))
