"""Several numbers of posts in one command: a run each, and accuracy against posts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.metrics.uncertainty import paired_difference
from prb_jax.scoring import reward_model
from prb_jax.scoring.reward_model import RewardModel
from tests.json_lines import write_lines
from tests.scoring.records import record


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = (dataclasses.replace(record(i), labels=(1.0, 0.0), user_id=f"u{i % 7}") for i in range(21))
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", (pair.to_row() for pair in pairs))


@pytest.mark.slow
def test_a_command_that_was_stopped_goes_on_and_each_point_is_a_run_by_itself(
    folder: Path, data: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    stream, loaded, load = RewardModel.stream, [], reward_model.load_reward_model

    def stopping(self: RewardModel, *arguments: Any, **options: Any) -> Any:
        if options["view"].profile_posts == 1:
            raise KeyboardInterrupt
        return stream(self, *arguments, **options)

    out = tmp_path / "sweep"
    command = ["evaluate", str(folder), "--data", data, "--out", str(out), "--no-progress"]
    command += ["--profile-posts", "2", "0", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(RewardModel, "stream", stopping)
        assert cli.main(command) == 130
    assert not (out / "posts.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(reward_model, "load_reward_model", lambda opened: loaded.append(opened) or load(opened))
        assert cli.main(command) == 0
    assert len(loaded) == 1
    shown = capsys.readouterr().out
    sweep = json.loads((out / "posts.json").read_text())
    assert [point["profile_posts"] for point in sweep["points"]] == [0, 1, 2]
    assert (out / "posts.png").read_bytes()[:4] == b"\x89PNG"
    rows = {}
    for point in sweep["points"]:
        number = point["profile_posts"]
        options: Any = {"profile_posts": number, "controls": "none", "progress": False}
        alone, run = (
            prb.evaluate(folder, data, out=tmp_path / f"{number}", **options),
            out / f"posts-{number}",
        )
        rows[number] = alone.rows
        for name in ("scores.jsonl", "summary.json"):
            assert (run / name).read_bytes() == (alone.out / name).read_bytes()
        inputs, expected = (json.loads((at / "run.json").read_text())["inputs"] for at in (run, alone.out))
        assert inputs == expected
        assert all(point[key] == alone.summary[key] for key in ("n", "accuracy", "ci95"))
        assert f"{point['accuracy']:.3f}" in shown
    gain, point = paired_difference(rows[2], rows[0]), sweep["points"][2]
    assert (point["difference"], point["difference_ci95"]) == (gain["difference"], gain["ci95"])
    assert sweep["points"][0]["difference"] is None


def test_from_python_with_controls_and_without_a_folder(model: RewardModel, data: str) -> None:
    records = prb.read_comparisons(data)
    sweep = prb.evaluate_posts(model, iter(records), profile_posts=[0, 3], controls="swap", progress=False)
    assert sweep.out is None
    assert "controls" not in sweep.evaluations[0].summary
    assert list(sweep.evaluations[3].summary["controls"]) == ["swap"]
    assert [point["accuracy"] for point in sweep.points] == [
        one.summary["accuracy"] for one in sweep.evaluations.values()
    ]


def test_a_config_file_may_name_several_numbers(
    folder: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "options.py"
    values = {
        "model": str(folder), "data": str(data), "profile_posts": [0, 1], "no_progress": True, "limit": 4
    }  # fmt: skip
    config.write_text(f"def get_config():\n    return {values!r}\n")
    assert cli.main(["evaluate", "--config", str(config), "--out", str(tmp_path / "run")]) == 0
    recorded = json.loads((tmp_path / "run" / "posts-1" / "run.json").read_text())["command"]
    assert recorded[recorded.index("--profile-posts") + 1 :][:2] == ["0", "1"]
    config.write_text(config.read_text().replace("[0, 1]", "[0, 'many']"))
    assert cli.main(["evaluate", "--config", str(config), "--out", str(tmp_path / "other")]) == 2
    assert "'profile_posts': expected a whole number, found 'many'" in capsys.readouterr().err


def test_what_cannot_be(folder: Path, data: str, tmp_path: Path) -> None:
    for model, posts, message in (
        (folder, [1], "expected two numbers or more, each once, found"),
        (folder, [1, 1], r"each once, found \[1, 1\]"),
        ("baseline:length", [0, 1], "profile_posts: baseline:length reads the whole text"),
    ):
        with pytest.raises(RunError, match=message):
            prb.evaluate_posts(model, data, profile_posts=posts, out=tmp_path / "x", progress=False)
