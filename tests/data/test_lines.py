"""Large files of lines: the records of a file whatever its blocks, each byte read once."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from prb_jax.data import blocks, lines
from prb_jax.data.files import read_rows
from prb_jax.data.lines import JsonLines
from prb_jax.errors import DataError

ODD = b'\xef\xbb\xbf\n  \r\n{"a": 1}\n\n\xc2\xa0\xe3\x80\x80\n {"b": "\xe3\x80\x80"}\r\n\n'
CONTENTS = {
    "nothing": b"",
    "blank lines alone": b"\n \n\xe2\x80\x83\n",
    "no last line end": ODD + b'{"c": 3}',
    "blank at the end": ODD + b'{"c": 3}\n   ',
    "long lines": ODD
    + b'{"d": "'
    + b"long " * 40
    + b'"}\n'
    + ODD.replace(b"\xef\xbb\xbf", b"")
    + b'{"e": 5}\n',
    "one long line": b'{"d": "' + "länger ".encode() * 30 + b'"}',
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
    monkeypatch.setattr(blocks, "BLOCK", block)
    monkeypatch.setattr(lines, "_PIECE", 7)
    monkeypatch.setattr(lines, "_HELD", 30)
    monkeypatch.setattr(lines, "_BEHIND", 10)
    path = write(tmp_path / name, CONTENTS[contents])
    expected = values(read_rows(path))
    forward = JsonLines(path)
    found = []
    while forward.reach(len(found) + 1) > len(found):
        found.append(forward.row(len(found)))
    assert values(found) == expected
    assert forward.complete
    assert forward.digest == blocks.large_digest(path)
    places = random.Random(0).choices(range(len(expected)), k=20) if expected else []
    again = JsonLines(path)
    assert len(again) == len(expected)
    assert values(map(again.row, places)) == [expected[place] for place in places]
    assert again.digest == forward.digest


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_reader_who_goes_forward_reads_each_byte_once_and_no_further_than_asked(
    tmp_path, monkeypatch, name
):
    monkeypatch.setattr(blocks, "BLOCK", 1 << 10)
    monkeypatch.setattr(lines, "_PIECE", 1 << 9)
    monkeypatch.setattr(lines, "_BEHIND", 1 << 9)
    draw = random.Random(1)
    rows = [{"n": n, "text": draw.randbytes(draw.randrange(90)).hex()} for n in range(500)]
    path = write(tmp_path / name, "".join(json.dumps(row) + "\n" for row in rows).encode())
    size, found = path.stat().st_size, JsonLines(path)
    assert found.row(0).value == rows[0]
    assert found.bytes_read <= 4 << 10 < size / 4  # a block, and those that are read ahead
    assert not found.complete
    for number, row in enumerate(rows[1:], start=1):
        assert found.reach(min(number + 20, len(rows))) >= number
        assert found.row(number).value == row
    assert found.reach(501) == len(found) == 500
    assert found.bytes_read == size
    assert found.row(0).value == rows[0]
    assert found.bytes_read > size


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_blocks_that_are_not_what_they_were_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(blocks, "BLOCK", 256)
    text = "".join(json.dumps({"n": n, "text": f"{n * 7919:x}" * 3}) + "\n" for n in range(100))
    path = write(tmp_path / name, text.encode())
    before = JsonLines(path)
    before.reach(30)
    kept = list(before.digests)
    assert 1 < len(kept) < blocks.block_count(path.stat().st_size)
    same = JsonLines(path)
    same.expect(kept)
    assert len(same) == 100
    other = bytearray(path.read_bytes())
    other[300] ^= 1
    path.write_bytes(other)
    changed = JsonLines(path)
    changed.expect(kept)
    with pytest.raises(DataError, match=r"x.jsonl.*: changed since it was scored \(block 2 of"):
        len(changed)
    late = JsonLines(path)
    with contextlib.suppress(DataError):  # what is packed is damaged now
        late.reach(100)
    with pytest.raises(DataError, match="changed since it was scored"):
        late.expect(kept)
    path.write_bytes(other[:200])
    with pytest.raises(DataError, match="changed since it was scored"):
        JsonLines(path).expect(kept)


def test_a_line_that_changes_and_a_file_that_becomes_shorter_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 64)
    monkeypatch.setattr(lines, "_HELD", 40)
    path = write(tmp_path / "x.jsonl", b"".join(b'{"n": %3d}\n' % n for n in range(100)))
    found = JsonLines(path)
    assert len(found) == 100
    contents = path.read_bytes()
    path.write_bytes(contents.replace(b" 50}", b" 51}"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"x.jsonl: changed while it was being read \(block 9\)"):
            found.row(50)
    assert found.row(2).value == {"n": 2}
    short = JsonLines(path)
    path.write_bytes(contents[:500])
    with pytest.raises(DataError, match="became shorter while it was being read"):
        len(short)


def test_two_readers_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 64)
    monkeypatch.setattr(lines, "_BEHIND", 20)
    path = write(tmp_path / "x.jsonl", b"".join(b'{"n": %3d}\n' % n for n in range(100)))
    found = JsonLines(path)
    for n in range(100):
        assert found.row(n).value == {"n": n}
        assert found.row(n // 2).value == {"n": n // 2}
        assert found.reach(n + 2) == min(100, n + 2)
    assert found.complete
    assert found.about() == 100
