"""The run folder: torn lines, changed runs, foreign files, full disks."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prb_jax.errors import RunError
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.writing import write_json
from prb_jax.scoring.run import open_evaluation

INPUTS = {"model": {"name": "m", "files": {"w": "sha256:1"}}, "profile_posts": 10, "protocol": "default"}


def rows(*names: str) -> list[ScoredRow]:
    return [ScoredRow(name, "s", None, [0.1, -2.5], [1.0, 0.0], 7, 0) for name in names]


def opened(out: Path, inputs: dict = INPUTS, *, session: dict | None = None):
    return open_evaluation(out, inputs=inputs, session=session or {"mesh": None}, notes={})


def refused(out: Path, message: str, inputs: dict = INPUTS) -> str:
    with pytest.raises(RunError, match=message) as caught, opened(out, inputs):
        pass
    return str(caught.value)


def write(out: Path, *names: str, inputs: dict = INPUTS) -> bytes:
    with opened(out, inputs) as run:
        run.file.append(rows(*names))
    return (out / "scores.jsonl").read_bytes()


def lines(out: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (out / "scores.jsonl").read_bytes().splitlines()]


def test_rows_are_appended_as_they_come_and_put_into_input_order_at_the_end(tmp_path):
    out = tmp_path / "a" / "b"
    out.mkdir(parents=True)
    (out / "log.txt").write_text("mine")  # is left alone
    (out / ".run.json.tmp").write_text('{"kin')  # was left by a kill
    with opened(out) as run:
        run.file.append(rows("c"))
        run.file.append(rows("a", "b"))
        run.file.append(rows("a", "c"))  # they are there
        assert lines(out) == ["c", "a", "b"]
        done = run.file.finish(["a", "b", "c"])
    assert lines(out) == [row.id for row in done] == ["a", "b", "c"]
    assert sorted(os.listdir(out)) == ["log.txt", "run.json", "scores.jsonl"]
    write(out, "c", "d")
    assert lines(out) == ["a", "b", "c", "d"]


def test_a_row_holds_the_contract_and_float32_scores_exactly(tmp_path):
    score = np.float32(0.1)
    with opened(tmp_path) as run:
        run.file.append([ScoredRow("1", None, "u", [score, 2], [1, 0], 5, {"posts_dropped": 2})])
        with pytest.raises(RunError, match=r"comparison 'x'.*nan"):
            run.file.append([ScoredRow("x", None, None, [float("nan"), 0.0], [1, 0])])
    row = json.loads((tmp_path / "scores.jsonl").read_text())
    assert list(row) == ["id", "subset", "user_id", "scores", "labels", "tokens", "truncated"]
    assert row["scores"][0] == float(score)
    assert row["truncated"] == {"posts_dropped": 2}


def test_a_torn_last_line_is_dropped_and_scored_again(tmp_path):
    whole = write(tmp_path, "a", "b")
    first = whole.splitlines(keepends=True)[0]
    for cut in range(len(whole)):
        (tmp_path / "scores.jsonl").write_bytes(whole[:cut])
        with opened(tmp_path) as run:
            assert list(run.file.rows) == (["a"] if cut >= len(first) else [])
            run.file.append(rows("a", "b"))
        assert (tmp_path / "scores.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    "damage", [b"{}\n", b"\0\0\0\n", b'{"id": 3}\n', b"[1]\n", b"null\n", b'"x"\n', b"again"]
)
def test_a_damaged_whole_line_is_an_error_naming_the_line(tmp_path, damage):
    line = write(tmp_path, "a")
    with (tmp_path / "scores.jsonl").open("ab") as file:
        file.write(line if damage == b"again" else damage)
    expected = "a second row for 'a'" if damage == b"again" else "not a row of scores"
    refused(tmp_path, rf"scores\.jsonl:2: {expected}")


def test_rows_missing_or_foreign_at_the_end_are_errors(tmp_path):
    with opened(tmp_path) as run:
        run.file.append(rows("a", "z"))
        with pytest.raises(RunError, match="1 of 2 rows of scores are missing, first 'b'"):
            run.file.finish(["a", "b"])
        with pytest.raises(RunError, match="1 rows of scores do not belong to this run, first 'z'"):
            run.file.finish(["a"])


def test_a_changed_run_is_refused_field_by_field(tmp_path):
    write(tmp_path, "a")
    before = (tmp_path / "run.json").read_bytes()
    changed = {**INPUTS, "model": {"name": "m", "files": {"v": "sha256:1"}}, "profile_posts": 0}
    message = refused(tmp_path, "holds another run", changed)
    for part in (
        str(tmp_path), "profile_posts: 10 -> 0", "--out",
        'model.files.w: "sha256:1" -> (absent)', 'model.files.v: (absent) -> "sha256:1"',
    ):  # fmt: skip
        assert part in message
    assert "protocol" not in message
    refused(tmp_path, "and 34 more", {f"k{i}": -1 - i for i in range(50)})
    assert (tmp_path / "run.json").read_bytes() == before
    assert lines(tmp_path) == ["a"]


def test_a_run_that_stopped_before_its_first_score_gives_way_to_another(tmp_path):
    write(tmp_path)
    write(tmp_path, "a", inputs={**INPUTS, "profile_posts": 3})
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["inputs"]["profile_posts"] == 3
    assert len(written["sessions"]) == 1


def test_every_session_is_recorded_and_may_differ(tmp_path):
    for fsdp in (1, 8, 2):
        with opened(tmp_path, session={"mesh": {"fsdp": fsdp}}) as run:
            if fsdp == 8:
                run.finish({"n": 0})  # nothing is run any more
    run = json.loads((tmp_path / "run.json").read_text())
    assert [session["mesh"]["fsdp"] for session in run["sessions"]] == [1, 8]
    assert run["inputs"] == INPUTS
    assert run["command"] == []  # Python called


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("scores.jsonl", [b"{}\n"], r"has scores\.jsonl but no run\.json"),
        ("summary.json", [b"{}\n"], r"has summary\.json but no run\.json"),
        ("run.json", [b"", b"[]", b"{}", b'{"kind": "training"}', b"\xff"], r"run\.json: not"),
    ],
)
def test_foreign_files_are_not_taken_over(tmp_path, name, texts, message):
    for text in texts:
        (tmp_path / name).write_bytes(text)
        refused(tmp_path, message)
        assert (tmp_path / name).read_bytes() == text


def test_out_that_is_no_folder_of_one_writer(tmp_path):
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file")
    refused(tmp_path / "file" / "below", "file/below")
    with opened(tmp_path):
        refused(tmp_path, "another process is writing")
    write(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    refused(tmp_path / "x", "Permission denied")


def test_no_space_left_is_one_clear_error_and_the_run_goes_on_later(tmp_path, monkeypatch):
    with opened(tmp_path) as run:
        run.file.append(rows("b"))
        written = (tmp_path / "scores.jsonl").read_bytes()
        real = os.write

        def full(file, data):
            if len(data) > 10:  # the disk takes a few bytes, then no more
                return real(file, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", lambda file, data: full(file, data[: max(10, len(data) - 10)]))
        with pytest.raises(RunError) as caught:
            run.file.append(rows("a"))
    monkeypatch.undo()
    assert f"cannot write {tmp_path / 'scores.jsonl'}: No space left on device" in str(caught.value)
    assert "the same command continues" in str(caught.value)
    assert (tmp_path / "scores.jsonl").read_bytes() == written
    with opened(tmp_path) as run:
        run.file.append(rows("a"))

        def refuse(source, target):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(RunError, match="No space left on device"):
            run.file.finish(["a", "b"])
        monkeypatch.undo()
        assert sorted(os.listdir(tmp_path)) == ["run.json", "scores.jsonl"]
        assert lines(tmp_path) == ["b", "a"]
        run.file.finish(["a", "b"])
    assert lines(tmp_path) == ["a", "b"]


WRITE_UNTIL_FULL = """
import resource, sys
from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.scoring.run import open_evaluation

resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
with open_evaluation(sys.argv[1], inputs={"model": {}}, session={}, notes={}) as run:
    for number in range(1000):
        try:
            run.file.append([ScoredRow(str(number), None, None, [0.5, 1.5], [1, 0])])
        except RunError as error:
            print(error)
            break
"""


def test_a_real_file_size_limit_leaves_whole_lines(tmp_path):
    command = [sys.executable, "-c", WRITE_UNTIL_FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert f"cannot write {tmp_path / 'scores.jsonl'}: File too large" in done.stdout
    data = (tmp_path / "scores.jsonl").read_bytes()
    assert data.endswith(b"\n")
    assert 0 < len(data) <= 4000
    with opened(tmp_path, {"model": {}}) as run:
        assert len(run.file.rows) == data.count(b"\n")


def test_json_is_strict(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "summary.json", {"accuracy": float("nan")})
    assert not (tmp_path / "summary.json").exists()
