"""Verbs of a policy as jobs of two processes: killed, continued, and the bytes of one process with as many devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from prb_jax import cli
from tests.json_lines import write_lines
from tests.platform.processes.jobs import SOON, ended, job, lines, run_job, wait_for
from tests.tiny_policies import write_policy
from tests.training.tiny import write_model

END = 3  # <|end|> of the tiny tokenizer
PROMPTS = 24


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_policy(folder, "qwen3", eos=END, num_hidden_layers=2, max_position_embeddings=300)
    return folder


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("reward") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        {
            "id": f"q{k}", "user_id": f"u{k % 8}", "question": f"What should I cook {'tonight ' * (k % 5)}?",
            "chosen": f"Tea with {k} friends.", "rejected": "No.",
            "profile": [{"id": "0", "text": f"I like walking number {k % 8}, and vegetables."}],
        }
        for k in range(PROMPTS)
    ]  # fmt: skip
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


def run(*words: object, processes: int, devices: int = 1) -> list[str]:
    """What the processes of a verb print, all of which come to their end."""
    command = ["-m", "prb_jax", *words, "--no-progress", *(["--distributed"] if processes > 1 else [])]
    return [output for output, _ in run_job(command, count=processes, devices=devices)]


def assert_same_files(folder: Path, expected: Path, *names: str) -> None:
    for name in names:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.slow
def test_sample(policy: Path, data: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    command = ("sample", policy, "--data", data, "--n", 2, "--max-new-tokens", 16, "--rows", 4)
    run(*command, "--out", one, processes=1, devices=2)
    killed = ["-m", "prb_jax", *command, "--out", two, "--no-progress", "--distributed"]
    with job(killed, count=2) as started:
        wait_for(lambda: lines(two / "samples.jsonl") >= 4, started)
        started[1].kill()
        results = ended(started, seconds=SOON)
    assert [status for status, *_ in results] == [1, -9], results
    assert "process 1 of 2" in results[0][2]
    assert 4 <= lines(two / "samples.jsonl") < 2 * PROMPTS
    said = run(*command, "--out", two, processes=2)
    assert "24 prompts, 2 samples of each" in said[0]
    assert "written to" not in said[1]
    assert_same_files(two, one, "samples.jsonl", "summary.json")
    sessions = json.loads((two / "run.json").read_text())["sessions"]
    assert [session["devices"]["processes"] for session in sessions] == [2, 2]


def begin(out: Path, whole: Path, *, rows: str, keep: int) -> None:
    """Leave a run as if it had been killed behind so many rows."""
    shutil.copytree(whole, out)
    kept = (out / rows).read_bytes().splitlines(keepends=True)[:keep]
    (out / rows).write_bytes(b"".join(kept))
    for name in ("summary.json", "behaviour.json"):
        (out / name).unlink(missing_ok=True)


def check_continued(folder: Path, *command: object, rows: str, keep: int, said: str) -> None:
    """Two processes continue a run that was killed, and leave the files of one process with as many devices."""
    one, two = folder / "one", folder / "two"
    run(*command, "--out", one, processes=1, devices=2)
    begin(two, one, rows=rows, keep=keep)
    outputs = run(*command, "--out", two, processes=2)
    assert said in outputs[0]
    assert "written to" not in outputs[1]
    assert_same_files(two, one, rows, "summary.json", "behaviour.json")


@pytest.mark.slow
def test_best_of_n(reward: Path, policy: Path, data: str, tmp_path: Path) -> None:
    samples = [
        {"id": f"q{k}", "sample": s, "text": f"Tea {k} {s} " * s + "."} for k in range(12) for s in range(3)
    ]
    command = (
        "best-of-n", "--samples", write_lines(tmp_path / "samples.jsonl", samples), "--data", data, "--quality",
        "baseline:length", "--rewards", reward, f"judge:{policy}",
    )  # fmt: skip
    check_continued(tmp_path, *command, rows="rewards.jsonl", keep=17, said="quality of the best of k")


@pytest.mark.slow
def test_policy_accuracy(reward: Path, policy: Path, data: str, tmp_path: Path) -> None:
    command = (
        "policy-accuracy", policy, "--rewards", reward, "baseline:length", "--data", data, "--candidates", 3,
        "--lambdas", "0,1",
    )  # fmt: skip
    check_continued(tmp_path, *command, rows="rows.jsonl", keep=20, said="policy alone (lambda 0)")


@pytest.mark.slow
def test_judge(policy: Path, data: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    command = ("judge", policy, "--data", data, "--controls", "blind")
    run(*command, "--out", one, processes=1, devices=2)
    begin(two, one, rows="scores.jsonl", keep=2)
    shutil.rmtree(two / "controls")
    kept = (one / "judgements.jsonl").read_bytes().splitlines(keepends=True)[:5]
    (two / "judgements.jsonl").write_bytes(b"".join(kept))
    said = run(*command, "--out", two, processes=2)
    assert "written to" in said[0]
    assert "written to" not in said[1]
    assert_same_files(
        two, one, "scores.jsonl", "judgements.jsonl", "summary.json", "controls/blind/scores.jsonl"
    )


@pytest.mark.slow
@pytest.mark.parametrize("by", [("--candidates", 3), ("--chunk", 3, "--candidates", 2, "--temperature", 1)])
def test_guide(by: tuple[object, ...], reward: Path, policy: Path, data: str, tmp_path: Path) -> None:
    command = (
        "guide", policy, "--reward", reward, "--data", data, "--quality", reward, "--max-new-tokens", 6,
    )  # fmt: skip
    check_continued(tmp_path, *command, *by, rows="samples.jsonl", keep=5, said="quality")


@pytest.mark.slow
def test_processes_that_draw_otherwise_are_refused(policy: Path, data: str, tmp_path: Path) -> None:
    command = ["-m", "prb_jax", "sample", policy, "--data", data, "--out", tmp_path / "run", "--distributed"]
    for _, errors in run_job([*command, "--seed", 1], count=2, others=[*command, "--seed", 2], status=2):
        assert "error: process 1 differs from process 0 in inputs.sampling.seed: 2, expected 1" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_judge_behind_an_endpoint_is_refused_by_several_processes(data: str, tmp_path: Path) -> None:
    samples = write_lines(tmp_path / "samples.jsonl", [{"id": "q0", "sample": 0, "text": "Tea."}])
    command = ["-m", "prb_jax", "best-of-n", "--samples", samples, "--data", data, "--out", tmp_path / "run"]
    rewards = ["--rewards", "baseline:length", "judge:http://127.0.0.1:9/v1#m", "--distributed"]
    for _, errors in run_job([*command, *rewards], count=2, status=2):
        assert "error: --distributed: only one process queries an endpoint" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--part", "1/2", "POLICY"], "--distributed: part: jobs that compute parts do not communicate"),
        (
            ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m"],
            "--distributed: only one process queries an endpoint",
        ),
    ],
)
def test_what_processes_cannot_do_together_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sample", *words, "--data", "x.jsonl", "--out", str(tmp_path / "run"), "--distributed"]
    assert cli.main(command) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"prb: error: {said}")
    assert errors.count("\n") == 1
