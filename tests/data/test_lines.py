"""Large files of lines: the records of a file whatever its blocks, each byte read once, by any number of processes."""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prb_jax.data import block_reader, blocks, inflated, lines
from prb_jax.data.files import read_rows
from prb_jax.data.lines import JsonLines
from prb_jax.errors import DataError
from prb_jax.sources import large
from prb_jax.sources.large import LargeComparisons, shares

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
    monkeypatch.setattr(inflated, "_PIECE", 7)
    monkeypatch.setattr(inflated, "_CHECKPOINT", 20)
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
    monkeypatch.setattr(inflated, "_PIECE", 1 << 9)
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
    late._source.blocks.rest()
    with pytest.raises(DataError, match="changed since it was scored"):
        late.expect(kept)
    path.write_bytes(other[:200])
    with pytest.raises(DataError, match="changed since it was scored"):
        JsonLines(path).expect(kept)


def test_a_line_that_changes_and_a_file_that_becomes_shorter_are_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 64)
    path = write(tmp_path / "x.jsonl", b"".join(b'{"n": %3d}\n' % n for n in range(100)))
    found = JsonLines(path)
    assert len(found) == 100
    contents = path.read_bytes()
    path.write_bytes(contents.replace(b" 50}", b" 51}").replace(b" 63}", b" 64}"))
    for number in (50, 63):  # the second one lies in two blocks
        with pytest.raises(DataError, match=rf"x.jsonl:{number + 1}: changed while it was being read"):
            found.row(number)
    short = JsonLines(path)
    path.write_bytes(contents[:500])
    with pytest.raises(DataError, match="became shorter while it was being read"):
        len(short)


class Processes:
    """Threads that take the places of the processes of a job."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._local = count, threading.local()
        self._meeting, self._sent = threading.Barrier(count), [np.zeros(0, np.int32)] * count
        for module in (block_reader, lines, large):
            for name, made in (
                ("process_count", self.many),
                ("process_index", self.own),
                ("gather_int32", self.gather),
            ):
                monkeypatch.setattr(module, name, made, raising=False)
        monkeypatch.setattr("prb_jax.processes.sharing.process_count", self.many)

    def functions(self) -> dict[str, Callable[..., Any]]:
        return {"process_count": self.many, "process_index": self.own, "gather_int32": self.gather}

    def many(self) -> int:
        return self.count

    def own(self) -> int:
        return self._local.index

    def gather(self, own: np.ndarray) -> list[np.ndarray]:
        self._sent[self.own()] = own
        self._meeting.wait(timeout=60)
        found = list(self._sent)
        self._meeting.wait(timeout=60)
        return found

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """What the work gives in each process: its value or its error."""
        found: list[Any] = [None] * self.count

        def start(index: int) -> None:
            self._local.index = index
            try:
                found[index] = work()
            except DataError as error:
                found[index] = error

        threads = [threading.Thread(target=start, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return found


@pytest.mark.parametrize("count", [2, 3])
def test_processes_together_read_each_byte_once(tmp_path, monkeypatch, count):
    monkeypatch.setattr(blocks, "BLOCK", 1 << 10)
    rows = [
        {"id": str(n), "question": "q" * (1 + n % 50), "chosen": "a", "rejected": "b" * (1 + n * 37 % 90)}
        for n in range(700)
    ]
    path = write(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    size, longest = path.stat().st_size, max(map(len, path.read_bytes().splitlines()))
    processes = Processes(count, monkeypatch)

    def work() -> tuple[list[list[int]], int, str, int]:
        file = JsonLines(path)
        comparisons = LargeComparisons([file])
        own, first = [], None
        for window in large.windows(comparisons, first=30, size=50):
            divided = shares(comparisons, window)
            assert sorted(index for part in divided for index in part) == list(window)
            own += [comparisons.read(index).comparison.id for index in divided[processes.own()]]
            first = first or file.bytes_read
        return own, file.bytes_read, file.digest, first or 0

    found = processes.run(work)
    assert all(isinstance(each, tuple) for each in found), found
    assert sorted((int(name) for own, *_ in found for name in own)) == list(range(700))
    assert size <= sum(read for _, read, *_ in found) <= size + blocks.block_count(size) * longest
    assert max(read for _, read, *_ in found) < size / count * 1.3
    assert sum(first for *_, first in found) < size / 2
    assert {digest for _, _, digest, _ in found} == {blocks.large_digest(path)}


def test_an_error_of_one_process_is_that_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 64)
    path = write(tmp_path / "x.jsonl", b'{"n": 1}\n' * 100)
    processes = Processes(2, monkeypatch)
    read = block_reader.read_block

    def failing(file: int, where: Path, number: int, **options: Any) -> bytes:
        if number == 5:
            raise OSError(5, "Input/output error")
        return read(file, where, number, **options)

    monkeypatch.setattr(block_reader, "read_block", failing)
    first, second = processes.run(lambda: len(JsonLines(path)))
    assert "x.jsonl: cannot be read" in str(first)
    assert "process 1: " in str(first)
    assert "x.jsonl: cannot be read: Input/output error" in str(second)
