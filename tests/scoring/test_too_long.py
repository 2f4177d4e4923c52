"""Responses that leave no room for their prompt: an error, or left out, counted and named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.scoring.reward_model import RewardModel
from tests.scoring.records import WORDS

LIMIT = 60
LONG = " ".join([*WORDS, *WORDS, *WORDS])


def comparisons() -> list[prb.Comparison]:
    """Nine pairs of three users; the third of each user is far too long on one side."""
    return [
        prb.Comparison(
            id=f"c{n}",
            question=f"{WORDS[n]} or {WORDS[n + 1]}?",
            chosen=f"{WORDS[n]}.",
            rejected=LONG if n % 3 == 2 else f"{WORDS[n + 1]}, never {WORDS[n]}.",
            user_id=f"u{n // 3}",
            subset="long" if n % 3 == 2 else "short",
            profile=[{"id": "1", "text": f"I like {WORDS[n]}."}],
        )
        for n in range(9)
    ]


def write(path: Path, items: list[prb.Comparison]) -> Path:
    path.write_text("".join(json.dumps(item.to_row()) + "\n" for item in items))
    return path


def test_by_default_it_stops_the_run_and_says_how_to_go_on(model: RewardModel, tmp_path: Path) -> None:
    with pytest.raises(prb.DataError, match=r"'c2': .* within max_length 60, .* --too-long skip leaves such"):
        prb.evaluate(model, comparisons(), out=tmp_path / "run", max_length=LIMIT, progress=False)


def test_left_out_counted_and_named(model: RewardModel, tmp_path: Path) -> None:
    items, out = comparisons(), tmp_path / "run"
    result = prb.evaluate(model, items, out=out, max_length=LIMIT, too_long="skip", progress=False)
    kept = [item for item in items if item.subset == "short"]
    assert [row.id for row in result.rows] == [item.id for item in kept]
    expected = model.score(kept, max_length=LIMIT)
    np.testing.assert_allclose([row.scores for row in result.rows], expected, atol=1e-6)
    assert result.summary["n"] == result.summary["baselines"]["baseline:length"]["n"] == 6
    assert result.summary["left_out"] == {"comparisons": 3, "by_subset": {"long": 3}, "by_benchmark": {}}
    assert "left_out" in result.summary["definitions"]
    named = [json.loads(line) for line in (out / "left_out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["user_id"], row["limit"]) for row in named] == [
        ("c2", "u0", LIMIT), ("c5", "u1", LIMIT), ("c8", "u2", LIMIT)
    ]  # fmt: skip
    assert all(row["tokens"] > LIMIT and "responses are never cut" in row["reason"] for row in named)
    # The choice belongs to the run: without it the folder is another run's.
    (out / "summary.json").unlink()
    again = prb.evaluate(model, items, out=out, max_length=LIMIT, too_long="skip", progress=False)
    assert again.summary == result.summary
    with pytest.raises(prb.RunError, match=r'too_long: "skip" -> \(absent\)'):
        prb.evaluate(model, items, out=out, max_length=LIMIT, progress=False)


def test_a_benchmark_scores_what_is_left(model: RewardModel, tmp_path: Path) -> None:
    source = f"prb:{write(tmp_path / 'data.jsonl', comparisons())}"
    whole = prb.evaluate("baseline:length", source, out=tmp_path / "length", progress=False)
    summary = prb.evaluate(
        model, source, out=tmp_path / "run", max_length=LIMIT, too_long="skip", progress=False
    ).summary
    assert summary["left_out"]["by_benchmark"] == {"prb": 3}
    assert summary["benchmarks"]["prb"]["score"] == summary["accuracy"]
    assert summary["benchmarks"]["prb"]["left_out"] == 3
    assert summary["readout"] == "logit"
    assert summary["baselines"]["baseline:length"]["n"] == whole.summary["n"] - 3


def test_nothing_left(model: RewardModel, tmp_path: Path) -> None:
    items = [item for item in comparisons() if item.subset == "long"]
    with pytest.raises(
        prb.DataError, match=r"every comparison is too long, nothing is left to score; .*'c2'"
    ):
        prb.evaluate(model, items, out=tmp_path, max_length=LIMIT, too_long="skip", progress=False)


def test_a_choice_without_effect_is_refused(model: RewardModel, tmp_path: Path) -> None:
    for scorer, protocol, message in (
        (model, "paper", "the paper protocol cuts responses"),
        ("baseline:length", "default", "no length limit"),
    ):
        with pytest.raises(prb.RunError, match=message):
            prb.evaluate(
                scorer, comparisons(), out=tmp_path, protocol=protocol, too_long="skip", progress=False
            )
    with pytest.raises(prb.RunError, match="too_long: expected error or skip, found 'cut'"):
        prb.evaluate(model, comparisons(), out=tmp_path, too_long="cut", progress=False)


def test_on_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data.jsonl", comparisons())
    command = ["evaluate", str(folder), "--data", str(data), "--max-length", str(LIMIT), "--no-progress"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "--too-long skip" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "run"), "--too-long", "skip"]) == 0
    assert "3 comparisons too long and left out, see left_out.jsonl" in " ".join(
        capsys.readouterr().out.split()
    )
