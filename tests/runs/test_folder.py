"""The run folder: torn lines, changed runs, foreign files, full disks."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prb_jax.data.writing import write_json
from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.runs.evaluation import open_evaluation

INPUTS = {"model": {"name": "m", "files": {"w": "sha256:1"}}, "profile_posts": 10, "protocol": "default"}


def rows(*names: str) -> list[ScoredRow]:
    return [ScoredRow(name, "s", None, [0.1, -2.5], [1.0, 0.0], 7, 0) for name in names]


def opened(out: Path, inputs: dict = INPUTS, *, session: dict | None = None):
    return open_evaluation(out, inputs=inputs, session=session or {"mesh": None}, notes={"command": ["prb"]})


def lines(out: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (out / "scores.jsonl").read_bytes().splitlines()]


def test_rows_are_appended_as_they_come_and_put_into_input_order_at_the_end(tmp_path):
    with opened(tmp_path / "a" / "b") as run:
        run.file.append(rows("c"))
        run.file.append(rows("a", "b"))
        assert lines(run.path) == ["c", "a", "b"]
        done = run.file.finish(["a", "b", "c"])
    assert lines(tmp_path / "a" / "b") == ["a", "b", "c"]
    assert [row.id for row in done] == ["a", "b", "c"]
    assert sorted(os.listdir(run.path)) == ["run.json", "scores.jsonl"]


def test_a_row_holds_the_contract_and_float32_scores_exactly(tmp_path):
    import numpy as np

    score = np.float32(0.1)
    with opened(tmp_path) as run:
        run.file.append([ScoredRow("1", None, "u", [score, 2], [1, 0], 5, {"posts_dropped": 2})])
    row = json.loads((tmp_path / "scores.jsonl").read_text())
    assert list(row) == ["id", "subset", "user_id", "scores", "labels", "tokens", "truncated"]
    assert np.float32(row["scores"][0]) == score
    assert row["scores"][0] == float(score)
    assert row["truncated"] == {"posts_dropped": 2}


def test_a_torn_last_line_is_dropped_and_scored_again(tmp_path):
    with opened(tmp_path) as run:
        run.file.append(rows("a", "b"))
    whole = (tmp_path / "scores.jsonl").read_bytes()
    first = whole.splitlines(keepends=True)[0]
    for cut in range(len(whole)):
        (tmp_path / "scores.jsonl").write_bytes(whole[:cut])
        with opened(tmp_path) as run:
            assert list(run.file.rows) == (["a"] if cut >= len(first) else [])
            run.file.append(rows("a", "b"))
        assert (tmp_path / "scores.jsonl").read_bytes() == whole


def test_a_row_that_is_there_is_not_written_twice(tmp_path):
    with opened(tmp_path) as run:
        run.file.append(rows("a"))
    with opened(tmp_path) as run:
        run.file.append(rows("a", "b"))
        run.file.append(rows("a", "b"))
    assert lines(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("damage", [b"{}\n", b"\0\0\0\n", b'{"id": 3}\n', b"[1]\n", b"null\n", b'"x"\n'])
def test_a_damaged_whole_line_is_an_error_naming_the_line(tmp_path, damage):
    with opened(tmp_path) as run:
        run.file.append(rows("a"))
    with (tmp_path / "scores.jsonl").open("ab") as file:
        file.write(damage)
    with pytest.raises(RunError, match=r"scores\.jsonl:2: not a row of scores"), opened(tmp_path):
        pass


def test_an_id_twice_on_disk_is_an_error_naming_the_line(tmp_path):
    with opened(tmp_path) as run:
        run.file.append(rows("a"))
    line = (tmp_path / "scores.jsonl").read_bytes()
    (tmp_path / "scores.jsonl").write_bytes(line + line)
    with pytest.raises(RunError, match=r"scores\.jsonl:2: a second row for 'a'"), opened(tmp_path):
        pass


def test_rows_missing_or_foreign_at_the_end_are_errors(tmp_path):
    with opened(tmp_path) as run:
        run.file.append(rows("a", "z"))
        with pytest.raises(RunError, match="1 of 2 rows of scores are missing, first 'b'"):
            run.file.finish(["a", "b"])
        with pytest.raises(RunError, match="1 rows of scores belong to nothing in this run, first 'z'"):
            run.file.finish(["a"])


def test_scores_that_are_not_finite_are_refused_by_id(tmp_path):
    with opened(tmp_path) as run, pytest.raises(RunError, match=r"comparison 'x'.*nan"):
        run.file.append([ScoredRow("x", None, None, [float("nan"), 0.0], [1, 0])])
    assert lines(tmp_path) == []


def test_a_changed_run_is_refused_field_by_field(tmp_path):
    with opened(tmp_path) as run:
        run.file.append(rows("a"))
    before = (tmp_path / "run.json").read_bytes()
    changed = {"model": {"name": "m", "files": {"v": "sha256:1"}}, "profile_posts": 0, "protocol": "default"}
    with pytest.raises(RunError) as caught, opened(tmp_path, changed):
        pass
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "profile_posts: 10 -> 0" in message
    assert 'model.files.w: "sha256:1" -> (absent)' in message
    assert 'model.files.v: (absent) -> "sha256:1"' in message
    assert "protocol" not in message
    assert "--out" in message
    assert (tmp_path / "run.json").read_bytes() == before
    assert lines(tmp_path) == ["a"]


def test_a_run_that_stopped_before_its_first_score_gives_way_to_another(tmp_path):
    with opened(tmp_path):
        pass
    with opened(tmp_path, {**INPUTS, "profile_posts": 3}) as run:
        run.file.append(rows("a"))
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["inputs"]["profile_posts"] == 3
    assert len(written["sessions"]) == 1


def test_long_differences_are_cut_short(tmp_path):
    with opened(tmp_path, {f"k{i}": i for i in range(50)}) as run:
        run.file.append(rows("a"))
    with pytest.raises(RunError, match="and 30 more"), opened(tmp_path, {f"k{i}": -1 - i for i in range(50)}):
        pass


def test_every_session_is_recorded_and_may_differ(tmp_path):
    with opened(tmp_path, session={"mesh": {"fsdp": 1}}):
        pass
    with opened(tmp_path, session={"mesh": {"fsdp": 8}}) as run:
        write_json(run.path / "summary.json", {"n": 0})
    with opened(tmp_path, session={"mesh": {"fsdp": 2}}):  # finished: nothing is run any more
        pass
    run = json.loads((tmp_path / "run.json").read_text())
    assert [session["mesh"]["fsdp"] for session in run["sessions"]] == [1, 8]
    assert run["inputs"] == INPUTS
    assert run["command"] == ["prb"]


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "log.txt").write_text("mine")
    with opened(tmp_path) as run:
        run.file.append(rows("a"))
    assert (tmp_path / "log.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["scores.jsonl", "summary.json"])
def test_outputs_without_run_json_are_not_taken_over(tmp_path, name):
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(RunError, match=rf"has {name} but no run\.json"), opened(tmp_path):
        pass
    assert (tmp_path / name).read_text() == "{}\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "training"}', "\xff"])
def test_a_foreign_run_json_is_not_taken_over(tmp_path, text):
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match=r"run\.json: not"), opened(tmp_path):
        pass


def test_a_leftover_temporary_file_does_no_harm(tmp_path):
    (tmp_path / ".run.json.tmp").write_text('{"kin')
    with opened(tmp_path) as run:
        run.file.append(rows("a"))
    assert not (tmp_path / ".run.json.tmp").exists()


def test_out_is_a_file_or_below_one(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"), opened(tmp_path / "file"):
        pass
    with pytest.raises(RunError, match="file/below"), opened(tmp_path / "file" / "below"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="Permission denied"), opened(tmp_path / "x"):
        pass


def test_a_second_writer_is_refused_and_the_lock_ends_with_the_first(tmp_path):
    with opened(tmp_path), pytest.raises(RunError, match="another process is writing"), opened(tmp_path):
        pass
    with opened(tmp_path):
        pass


def test_no_space_left_is_one_clear_error_and_the_run_goes_on_later(tmp_path, monkeypatch):
    with opened(tmp_path) as run:
        run.file.append(rows("a"))
        written = (tmp_path / "scores.jsonl").read_bytes()
        real = os.write

        def full(file, data):
            if len(data) > 10:  # the disk takes a few bytes, then no more
                return real(file, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", lambda file, data: full(file, data[: max(10, len(data) - 10)]))
        with pytest.raises(RunError) as caught:
            run.file.append(rows("b"))
    monkeypatch.undo()
    message = str(caught.value)
    assert f"cannot write {tmp_path / 'scores.jsonl'}: No space left on device" in message
    assert "the same command continues" in message
    assert (tmp_path / "scores.jsonl").read_bytes() == written
    with opened(tmp_path) as run:
        run.file.append(rows("b"))
        run.file.finish(["a", "b"])
    assert lines(tmp_path) == ["a", "b"]


WRITE_UNTIL_FULL = """
import resource, sys
from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.runs.evaluation import open_evaluation

resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
with open_evaluation(sys.argv[1], inputs={"model": 1}, session={}, notes={}) as run:
    for number in range(1000):
        try:
            run.file.append([ScoredRow(str(number), None, None, [0.5, 1.5], [1, 0])])
        except RunError as error:
            print(error)
            break
"""


def test_a_real_file_size_limit_leaves_whole_lines(tmp_path):
    command = [sys.executable, "-c", WRITE_UNTIL_FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f"cannot write {tmp_path / 'scores.jsonl'}: File too large" in done.stdout
    data = (tmp_path / "scores.jsonl").read_bytes()
    assert data.endswith(b"\n")
    assert 0 < len(data) <= 4000
    with opened(tmp_path, {"model": 1}) as run:
        assert len(run.file.rows) == data.count(b"\n")


def test_no_space_for_the_final_order_keeps_the_scores(tmp_path, monkeypatch):
    with opened(tmp_path) as run:
        run.file.append(rows("b", "a"))

        def refuse(source, target):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(RunError, match="No space left on device"):
            run.file.finish(["a", "b"])
        monkeypatch.undo()
        assert sorted(os.listdir(tmp_path)) == ["run.json", "scores.jsonl"]
        assert lines(tmp_path) == ["b", "a"]


def test_json_is_strict(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "summary.json", {"accuracy": float("nan")})
    assert not (tmp_path / "summary.json").exists()
