"""Runs that read a large file while they score it: what the folder says meanwhile, after a kill, and at the end."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prb_jax import DataError, PrbWarning, RunError, evaluate
from prb_jax.records import large_lines
from prb_jax.records.sources.prepare import prepare
from prb_jax.runs.evaluation import BLOCKS, SCORES
from prb_jax.runs.rows import RowFile
from prb_jax.scoring import plain
from tests.json_lines import write_lines
from tests.scoring.large_process import Counts, read_by_windows
from tests.scoring.records import read_json
from tests.scoring.test_large import COUNT, data, files, row  # noqa: F401 - a fixture

AT_A_TIME = 64
BLOCK = 1 << 13


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Every file is large, with many blocks, and scored some rows at a time."""
    monkeypatch.setattr(plain, "_BATCH", AT_A_TIME)
    return read_by_windows(partial(monkeypatch.setattr, raising=False), block=BLOCK)


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Path:  # noqa: F811
    return shutil.copy(data, tmp_path / "data.jsonl")


def score(path: Any, out: Path, **options: Any) -> Any:
    return evaluate("baseline:length", path, out=out, progress=False, **options)


def at_scores(
    monkeypatch: pytest.MonkeyPatch, *, before: Callable[[], None] | None = None, after: Any = None
) -> None:
    """Do something before scores are appended, and after it with their number."""
    append = RowFile.append

    def appended(self: RowFile[Any], rows: Any, **options: Any) -> None:
        scored = self.path.name == SCORES
        if scored and before is not None:
            before()
        append(self, rows, **options)
        if scored and after is not None:
            after(len(rows))

    monkeypatch.setattr(RowFile, "append", appended)


def killed(
    monkeypatch: pytest.MonkeyPatch, path: Any, out: Path, *, batches: int = 3, **options: Any
) -> None:
    """A run that is killed after so many batches, when these are on disk."""
    written: list[int] = []

    def count(rows: int) -> None:
        written.append(rows)
        if len(written) == batches:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_scores(patch, after=count)
        with pytest.raises(KeyboardInterrupt):
            score(path, out, **options)


def inputs_of(out: Path) -> Any:
    return read_json(out / "run.json")["inputs"]


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@pytest.mark.parametrize("packed", [False, True])
def test_first_rows_come_before_the_last_block_and_each_byte_is_read_once(
    copy, seen, tmp_path, monkeypatch, packed
):
    score(copy, tmp_path / "held")
    path, size = copy, copy.stat().st_size
    if packed:
        path = tmp_path / "data.jsonl.gz"
        path.write_bytes(gzip.compress(copy.read_bytes()))
        monkeypatch.setattr(large_lines, "BLOCK", BLOCK // 16)
        monkeypatch.setattr(large_lines, "_PIECE", BLOCK // 16)
        size = path.stat().st_size
    seen.files.clear()
    out, told = tmp_path / "run", []

    def look() -> None:
        told.append((seen.bytes, inputs_of(out)["data"], lines(out / BLOCKS)))

    at_scores(monkeypatch, before=look)
    score(path, out)
    first_bytes, first_data, first_blocks = told[0]
    assert first_bytes < size / 2
    assert first_data["comparisons"] is None
    assert first_data["sources"][0]["files"] == {path.name: None}
    assert 1 <= first_blocks < large_lines.block_count(size) / 2
    # The first block is looked at before.
    assert size <= seen.bytes <= size + large_lines.BLOCK
    assert seen.held <= 3 * AT_A_TIME < COUNT
    assert files(out) == files(tmp_path / "held")
    assert not (out / BLOCKS).exists()
    described = inputs_of(out)["data"]
    assert described["comparisons"] == COUNT
    assert described["sources"][0]["files"] == {path.name: large_lines.large_digest(path)}
    assert set(read_json(out / "run.json")) == set(read_json(tmp_path / "held" / "run.json"))
    assert score(path, out).summary["n"] == COUNT


def test_data_that_changes_between_two_parts_of_a_run_is_refused(copy, seen, tmp_path, monkeypatch):
    score(copy, tmp_path / "whole")
    out, contents = tmp_path / "run", copy.read_bytes()
    killed(monkeypatch, copy, out)
    before = (out / "scores.jsonl").read_bytes()
    for other in (contents.replace(b"yes 5", b"yes 6", 1), contents[:BLOCK]):
        copy.write_bytes(other)
        with pytest.raises(DataError, match=r"data.jsonl: changed since it was scored .* restore them"):
            score(copy, out)
        assert (out / "scores.jsonl").read_bytes() == before
    copy.write_bytes(contents)
    (out / BLOCKS).rename(tmp_path / "kept")
    with pytest.raises(RunError, match=r"blocks.jsonl: missing or empty.* restore it"):
        score(copy, out)
    (out / BLOCKS).write_text('{"file": 0, "block": 1, "sha256": ""}\n')
    with pytest.raises(RunError, match=r"blocks.jsonl: 0, 1: not the next block"):
        score(copy, out)
    (tmp_path / "kept").replace(out / BLOCKS)
    score(copy, out)
    assert files(out) == files(tmp_path / "whole")
    copy.write_bytes(contents.replace(b"yes 799", b"yes 798"))
    with pytest.raises(RunError, match=r"data\.sources\[0\]\.files\.data\.jsonl: \"sha256-blocks:"):
        score(copy, out)


@pytest.mark.parametrize("place", ["read", "unread"])
def test_data_that_changes_during_a_run(copy, seen, tmp_path, monkeypatch, place):
    """What was read already is compared at the end; what was not is scored as it is when it is read."""
    contents = copy.read_bytes()
    old, new = (b"yes 5", b"yes 6") if place == "read" else (b"yes 799", b"yes 798")
    other = contents.replace(old, new, 1)
    written: list[int] = []

    def change(rows: int) -> None:
        written.append(rows)
        if len(written) == 3:
            with copy.open("r+b") as file:
                file.write(other)

    with monkeypatch.context() as patch:
        at_scores(patch, after=change)
        if place == "read":
            with pytest.raises(DataError, match=r"data.jsonl: changed while it was being scored"):
                score(copy, tmp_path / "run")
            assert lines(tmp_path / "run" / "scores.jsonl") == COUNT
            return
        score(copy, tmp_path / "run")
    score(copy, tmp_path / "new")
    assert files(tmp_path / "run") == files(tmp_path / "new")
    assert inputs_of(tmp_path / "run")["data"] == inputs_of(tmp_path / "new")["data"]


def test_a_prepared_copy_continues_a_run_whose_data_is_known(copy, seen, tmp_path, monkeypatch):
    score(copy, tmp_path / "whole")
    prepared = prepare([str(copy)], out=tmp_path / "prepared").folder
    killed(monkeypatch, copy, tmp_path / "run")
    with pytest.raises(RunError, match=r"before its data was read to the end.*continue with the files"):
        score(prepared, tmp_path / "run")
    score(copy, tmp_path / "run")
    score(prepared, tmp_path / "run")
    killed(monkeypatch, prepared, tmp_path / "begun")
    score(copy, tmp_path / "begun")
    assert files(tmp_path / "begun") == files(tmp_path / "run") == files(tmp_path / "whole")
    assert inputs_of(tmp_path / "begun") == inputs_of(tmp_path / "whole")


def test_equal_records_and_users_that_look_alike_are_told_at_the_end(seen, tmp_path):
    rows = [
        {"question": f"q{n % 4}", "chosen": "aa", "rejected": "b", "user_id": "ann" + " " * (n % 2)}
        for n in range(6)
    ]
    path = write_lines(tmp_path / "data.jsonl", rows)
    with pytest.warns(PrbWarning) as told:
        assert score(path, tmp_path / "run").summary["n"] == 6
    equal, alike = (str(warning.message) for warning in told if warning.category is PrbWarning)
    assert "2 of 6 records without an id are equal to an earlier one" in equal
    assert "2 names differ from another one only by Unicode form or white space" in alike


def test_a_part_of_the_data_is_known_by_all_of_it(copy, seen, tmp_path, monkeypatch):
    other = tmp_path / "other.jsonl"
    several = [str(copy), write_lines(other, (row(n) | {"id": f"other {n}"} for n in range(300)))]
    assert score(several, tmp_path / "whole", limit=200).summary["n"] == 400
    killed(monkeypatch, several, tmp_path / "run", batches=5, limit=200)
    assert {json.loads(line)["file"] for line in (tmp_path / "run" / BLOCKS).open()} == {0, 1}
    score(several, tmp_path / "run", limit=200)
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    described = [source["files"] for source in inputs_of(tmp_path / "run")["data"]["sources"]]
    assert described == [{path.name: large_lines.large_digest(path)} for path in (copy, other)]
    assert score(copy, tmp_path / "rare", subset="rare").summary["n"] == len(range(0, COUNT, 97))
