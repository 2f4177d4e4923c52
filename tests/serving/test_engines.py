"""The files of `docs/engines`, run by the real trainers where these are installed: rewards are the model's scores."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import prb_jax as prb
from tests.behaviour.rl.tiny import write_tiny_policy
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import write_model
from tests.serving.local_server import serving

ENGINES = Path(__file__).resolve().parents[2] / "docs" / "engines"
USERS = 50
TUNIX = os.environ.get("PRB_TUNIX_PYTHON") or (sys.executable if importlib.util.find_spec("tunix") else None)
"""tunix may have an environment of its own: the variable names the Python of one that has tunix and jax."""


@dataclass(frozen=True)
class Work:
    """A folder with a policy and people, and the servers of a reward and a gold reward."""

    folder: Path
    rows: list[dict[str, Any]]
    reward: prb.RewardModel
    gold: prb.RewardModel
    arguments: list[str]

    def scores(self, model: prb.RewardModel, row: dict[str, Any], texts: list[str]) -> list[float]:
        """The model's own scores; -10 for an empty text, as the files say."""
        shown = [text for text in texts if text]
        if not shown:
            return [-10.0] * len(texts)
        asked = {name: row[name] for name in ("question", "user_id", "profile")}
        scores = iter(model.score(prb.Comparison(id="1", responses=shown, **asked)).tolist())
        return [next(scores) if text else -10.0 for text in texts]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    folder = tmp_path_factory.mktemp("engines")
    rows = [
        {
            "id": str(k),
            "user_id": f"user {k % USERS}",
            "question": f"What should I cook on day {k}?",
            "profile": [
                {"id": str(post), "category": "food", "text": f"I like soup {k % USERS} of {post}."}
                for post in range(1 + k % USERS % 3)
            ],
        }
        for k in range(10 * USERS)
    ]
    data = write_lines(folder / "people.jsonl", rows)
    write_tiny_policy(folder / "policy")
    models = [
        prb.load(write_model(folder / str(seed), "qwen3", num_hidden_layers=1, seed=seed)) for seed in (0, 1)
    ]
    options = {"batch_tokens": 4096, "limits": prb.Limits(waiting=100_000)}
    with serving(models[0], **options) as reward, serving(models[1], **options) as gold:
        given = {"policy": folder / "policy", "data": data, "reward": reward, "gold": gold}
        arguments = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
        yield Work(folder, rows, models[0], models[1], arguments)


def _run(*command: str | Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ENGINES.parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_verl_s_files_give_the_scores_of_the_rows(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """As verl 0.8 does: the data are read from parquet, the file of the reward is loaded by its path."""
    table = work.folder / "train.parquet"
    runpy.run_path(str(ENGINES / "verl_data.py"))["main"](str(work.folder / "people.jsonl"), str(table))
    monkeypatch.setenv("PRB_REWARD", work.arguments[5])
    monkeypatch.setenv("PRB_GOLD", work.arguments[7])
    compute_score = runpy.run_path(str(ENGINES / "verl_reward.py"))["compute_score"]
    read = pq.read_table(table).to_pylist()
    assert len(read) == len(work.rows)
    for row, given in list(zip(work.rows, read, strict=True))[:3]:
        assert given["prompt"] == [{"role": "user", "content": row["question"]}]
        for text in ("Soup.", ""):
            extra = given["extra_info"] | {"num_turns": 2, "rollout_reward_scores": {}}
            sent = {"solution_str": text, "ground_truth": given["reward_model"]["ground_truth"]}
            rewards = compute_score(data_source=given["data_source"], extra_info=extra, **sent)
            models = {"score": work.reward, "gold": work.gold}
            expected = {name: work.scores(model, row, [text])[0] for name, model in models.items()}
            assert rewards == pytest.approx(expected, abs=1e-5)


def test_maxtext_s_file_keeps_the_person_of_a_row(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MaxText 0.2.5 does: `process_data` of each row of parquet, arrays, `tmvp_config` with the columns."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("PRB_REWARD", work.arguments[5])
    loaded = runpy.run_path(str(ENGINES / "maxtext_people.py"))
    table = work.folder / "people.parquet"
    data = {"train": str(work.folder / "people.jsonl")}
    datasets.load_dataset("json", data_files=data, split="train", cache_dir=str(work.folder)).to_parquet(
        table
    )
    rows = pq.read_table(table).to_pylist()[:6]
    tokenizer = work.reward.tokenizer.tokenizer
    made = [loaded["process_data"]("people", tokenizer, {}, object(), row) for row in rows]
    columns = {name: np.repeat(np.array([one[name] for one in made]), 2) for name in made[0]}
    assert all(array.dtype.kind == "U" for array in columns.values())  # grain batches no lists
    prompts = columns.pop("prompts").tolist()
    rewards = loaded["reward"](
        prompts=prompts, completions=["Soup.", ""] * 6, tmvp_config=object(), mode="train", **columns
    )
    expected = [score for row in work.rows[:6] for score in work.scores(work.reward, row, ["Soup.", ""])]
    assert rewards == pytest.approx(expected, abs=1e-5)
    assert loaded["reward"].__name__ == "reward"


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "rollouts"), [(2, 8), (5, 1000)])
def test_two_ranks_of_trl_lose_no_rollout(work: Work, steps: int, rollouts: int) -> None:
    """At the end 10,000 rollouts of 50 users: each is rewarded by the score of its own text for its own user."""
    pytest.importorskip("trl")
    out = work.folder / f"trl-{rollouts}"
    _run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        ENGINES / "trl_grpo.py", *work.arguments, "--steps", str(steps), "--rollouts", str(rollouts),
        "--generations", "4", "--new-tokens", "8", "--keep-rollouts", "--out", out,
    )  # fmt: skip
    seen: Counter[str] = Counter()
    rows = {row["question"]: row for row in work.rows}
    logged = json.loads((out / "rewards.json").read_text())
    files = sorted((out / "completions").glob("*.parquet"))
    assert len(files) == len(logged) == steps
    for file, log in zip(files, logged, strict=True):
        means = {"reward": 0.0, "gold": 0.0}
        table = pq.read_table(file).to_pylist()
        assert len(table) == 2 * rollouts
        texts: dict[str, list[dict[str, Any]]] = {}
        for given in table:
            (turn,) = given["prompt"] if isinstance(given["prompt"], list) else json.loads(given["prompt"])
            texts.setdefault(turn["content"], []).append(given)
        for question, together in texts.items():
            row = rows[question]
            answers = [given["completion"][0]["content"] for given in together]
            for name, model in (("reward", work.reward), ("gold", work.gold)):
                expected = work.scores(model, row, answers)
                assert [given[name] for given in together] == pytest.approx(expected, abs=1e-5)
                means[name] += sum(expected)
            seen[row["user_id"]] += len(together)
        for name, total in means.items():
            assert log[f"rewards/{name}/mean"] == pytest.approx(total / len(table), abs=1e-5)
    assert sum(seen.values()) == 2 * steps * rollouts
    assert rollouts < 1000 or len(seen) == USERS


@pytest.mark.slow
@pytest.mark.skipif(
    TUNIX is None, reason="tunix is not installed (PRB_TUNIX_PYTHON names a Python that has it)"
)
@pytest.mark.parametrize("served", [True, False])
def test_tunix_trains_with_the_reward(work: Work, tmp_path: Path, served: bool) -> None:
    """Of a server, or of a model on the learner's mesh; the gold reward is served."""
    arguments = list(work.arguments)
    if not served:
        arguments[arguments.index("--reward") + 1] = str(work.folder / "0")
    sizes = "--steps 2 --prompts 2 --generations 2 --prompt-tokens 64 --new-tokens 8"
    kept = tmp_path / "rollouts.jsonl"
    shown = _run(TUNIX or "", ENGINES / "tunix_grpo.py", *arguments, *sizes.split(), "--rollouts", kept)
    pairs = re.findall(r"^reward (\S+)  gold (\S+)$", shown, re.MULTILINE)
    means, steps = [tuple(map(float, pair)) for pair in pairs], read_lines(kept)
    assert len(means) == len(steps) == 2
    rows = {row["question"]: row for row in work.rows}
    for (reward, gold), step in zip(means, steps, strict=True):
        for model, values, mean in ((work.reward, step["reward"], reward), (work.gold, step["gold"], gold)):
            expected = [
                work.scores(model, rows[question], [text])[0]
                for question, text in zip(step["question"], step["text"], strict=True)
            ]
            assert values == pytest.approx(expected, abs=1e-5)
            assert mean == pytest.approx(np.mean(expected), abs=1e-4)
