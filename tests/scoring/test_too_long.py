"""Responses that leave no room for their prompt: an error, or left out, counted and named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.scoring.reward_model import RewardModel
from tests.json_lines import read_lines
from tests.scoring.records import WORDS, write_comparisons

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
    named = read_lines(out / "left_out.jsonl")
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
    source = f"prb:{write_comparisons(tmp_path / 'data.jsonl', comparisons())}"
    summary = prb.evaluate(model, source, max_length=LIMIT, too_long="skip", progress=False).summary
    assert summary["left_out"]["by_benchmark"] == {"prb": 3}
    assert summary["benchmarks"]["prb"]["score"] == summary["accuracy"]
    assert summary["benchmarks"]["prb"]["left_out"] == 3
    assert summary["readout"] == "logit"
    assert summary["baselines"]["baseline:length"]["n"] == 6


def test_with_nothing_left_and_choices_without_effect_it_is_refused(model: RewardModel) -> None:
    long = [item for item in comparisons() if item.subset == "long"]
    nothing_left = r"every comparison is too long, so nothing is left to score; .*'c2'"
    for scorer, options, error, message in (
        (model, {"max_length": LIMIT}, prb.DataError, nothing_left),
        (model, {"protocol": "paper"}, prb.RunError, "the paper protocol cuts responses"),
        ("baseline:length", {"protocol": "default"}, prb.RunError, "no length limit"),
        (model, {"too_long": "cut"}, prb.RunError, "too_long: expected error or skip, found 'cut'"),
    ):
        with pytest.raises(error, match=message):
            prb.evaluate(scorer, long, **{"too_long": "skip", **options}, progress=False)


def test_on_the_command_line_it_is_an_error_that_says_how_to_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_comparisons(tmp_path / "data.jsonl", comparisons())
    command = ["evaluate", str(folder), "--data", str(data), "--max-length", str(LIMIT), "--no-progress"]
    command += ["--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert re.search(
        r"'c2': .* within max_length 60, .* --too-long skip leaves such", capsys.readouterr().err
    )
    assert main([*command, "--too-long", "skip"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 comparisons too long and left out, see left_out.jsonl" in shown
