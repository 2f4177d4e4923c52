"""Controls: the same model without the user, and with another one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import paired_difference
from prb_jax.personal.method import Users
from prb_jax.personal.prompts import save_prompts
from prb_jax.reports.table import gained, signed
from prb_jax.runs.finished import read_finished
from prb_jax.scoring.controls import with_other_users, without_user
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.text.view import View
from tests.scoring.records import read_json, record, score_rows, write_comparisons


@pytest.fixture(scope="module")
def labelled() -> list[prb.Comparison]:
    """Of 6 users; every fourth comparison has no profile."""
    return [
        dataclasses.replace(record(number), labels=(1.0, 0.0), user_id=f"u{number % 6}")
        for number in range(30)
    ]


@pytest.fixture(scope="module")
def finished(model: RewardModel, labelled: list[prb.Comparison], tmp_path_factory) -> prb.Evaluation:
    out = tmp_path_factory.mktemp("controls")
    return prb.evaluate(model, labelled, out=out, controls="all", batch_tokens=512, progress=False)


def test_blind_is_the_run_without_posts(
    finished: prb.Evaluation, model: RewardModel, labelled: list[prb.Comparison], tmp_path: Path
) -> None:
    alone = prb.evaluate(
        model, labelled, out=tmp_path, profile_posts=0, batch_tokens=512, controls="none", progress=False
    )
    blind = finished.out / "controls" / "blind"
    assert (blind / "scores.jsonl").read_bytes() == (tmp_path / "scores.jsonl").read_bytes()
    figures = finished.summary["controls"]["blind"]
    written = read_json(blind / "summary.json")
    assert figures["accuracy"] == alone.summary["accuracy"] == written["accuracy"]
    assert "controls" not in alone.summary
    assert not (tmp_path / "controls").exists()
    assert read_json(blind / "run.json")["inputs"]["control"] == "blind"
    assert figures["shown_otherwise"] == 30  # their users, if not their profiles


def test_swap_shows_the_profiles_of_others(
    finished: prb.Evaluation, model: RewardModel, labelled: list[prb.Comparison]
) -> None:
    shown = with_other_users(labelled, view=View(10))
    expected = model.score(shown, batch_tokens=512)
    rows = score_rows(finished.out / "controls" / "swap")
    assert [row["scores"] for row in rows] == [pytest.approx(row.tolist(), abs=1e-5) for row in expected]
    assert [row["user_id"] for row in rows] == [comparison.user_id for comparison in labelled]
    assert finished.summary["controls"]["swap"]["shown_otherwise"] == sum(bool(c.profile) for c in labelled)


def test_the_gain_is_the_paired_difference(finished: prb.Evaluation) -> None:
    def accuracy(rows: Sequence[ScoredRow]) -> float:
        return float(np.mean([row.scores[0] > row.scores[1] for row in rows]))

    for name, figures in finished.summary["controls"].items():
        control = read_finished(finished.out / "controls" / name).rows
        assert figures["difference"] == pytest.approx(accuracy(finished.rows) - accuracy(control))
        assert figures["n"] == 30
        assert figures["difference_ci95"] == paired_difference(finished.rows, control)["ci95"]
    assert "blind" in finished.summary["definitions"]["controls"]
    assert read_json(finished.out / "summary.json") == finished.summary


def people(count: int, *, user: bool = True) -> list[prb.Comparison]:
    """Two rows a person; the profile of person i has about 10 * i characters, and a text that all share."""
    return [
        prb.Comparison(
            id=f"{i}-{k}", question="?", chosen="a", rejected="b", user_id=f"u{i}" if user else None,
            profile=[{"text": "all" if user else f"all{i}"}, {"id": f"p{i}", "text": f"{i:03}" + "x" * (10 * i)}],
        )
        for i in range(count) for k in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("user", [True, False])
def test_swap_gives_everybody_one_other_profile_of_similar_length(user: bool) -> None:
    items = people(60, user=user)
    owner = {item.profile: number // 2 for number, item in enumerate(items)}
    shown = with_other_users(items, seed=1)
    given = [owner[item.profile] for item in shown]
    for number, (item, other) in enumerate(zip(items, shown)):
        assert dataclasses.replace(other, profile=item.profile, user_id=item.user_id) == item
        assert given[number] != number // 2
        assert abs(given[number] - number // 2) <= 8
        assert other.user_id == items[2 * given[number]].user_id
    assert given[::2] == given[1::2]
    assert len(set(given)) > 30
    assert with_other_users(items, seed=1) == shown
    by_id = {item.id: item.profile for item in with_other_users(items[::-1], seed=1)}
    assert [by_id[item.id] for item in items] == [item.profile for item in shown]
    assert with_other_users(items, seed=2) != shown


def test_a_profile_that_shares_a_post_may_be_the_same_persons() -> None:
    items = people(3, user=False)
    same = [dataclasses.replace(item, profile=items[0].profile[:1] + item.profile[1:]) for item in items]
    with pytest.raises(
        RunError, match=r"no other user has a profile to show in place of .* comparison '0-0'"
    ):
        with_other_users(same)


def test_rows_without_a_profile_keep_none() -> None:
    items = [*people(3), dataclasses.replace(people(1)[0], id="x", profile=())]
    assert with_other_users(items)[-1] == items[-1]
    blind = without_user(items[0])
    assert (blind.profile, blind.user_id) == ((), None)


def test_users_that_a_model_knows_by_name_are_controlled_too(folder: Path, tmp_path: Path) -> None:
    known = shutil.copytree(folder, tmp_path / "known")
    rm = prb.load(folder)
    table = np.random.default_rng(0).normal(size=(4, 2, rm.config.hidden_size)).astype(np.float32)
    save_prompts(known, Users(("u0", "u1", "u2")), table)
    items = [dataclasses.replace(record(4 * i), labels=(1.0, 0.0), user_id=f"u{i % 3}") for i in range(9)]
    result = prb.evaluate(known, items, out=tmp_path / "run", controls="all", progress=False)
    assert result.summary["unknown_users"] == 0
    loaded = prb.load(known)
    generic = loaded.score([dataclasses.replace(item, user_id=None) for item in items])
    blind, swap = (score_rows(tmp_path / "run" / "controls" / name) for name in ("blind", "swap"))
    assert [row["scores"] for row in blind] == [pytest.approx(row.tolist(), abs=1e-5) for row in generic]
    assert all(a["scores"] != b["scores"] for a, b in zip(score_rows(tmp_path / "run"), swap))


def test_the_default_is_blind_where_a_profile_is_seen(
    model: RewardModel, labelled: list[prb.Comparison]
) -> None:
    run: dict[str, Any] = {"batch_tokens": 512, "progress": False}
    assert list(prb.evaluate(model, labelled[:8], **run).summary["controls"]) == ["blind"]
    assert "controls" not in prb.evaluate(model, labelled[:8], profile_posts=0, **run).summary
    bare = [dataclasses.replace(comparison, profile=()) for comparison in labelled[:8]]
    assert "controls" not in prb.evaluate(model, bare, **run).summary
    assert "controls" not in prb.evaluate("baseline:profile-overlap", labelled, progress=False).summary
    asked = prb.evaluate("baseline:profile-overlap", labelled, controls="all", progress=False).summary
    assert asked["controls"]["blind"]["ties"] == 30
    for options in ({"profile_posts": 0}, {"protocol": "paper"}):
        with pytest.raises(RunError, match="controls=swap: the model sees no user information"):
            prb.evaluate(model, labelled, controls="swap", **options, **run)
    with pytest.raises(RunError, match="controls: expected none or blind or swap or all, found 'both'"):
        prb.evaluate(model, labelled, controls="both", **run)


def test_the_command_line_prints_the_gain(
    folder: Path,
    labelled: list[prb.Comparison],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # no cell is broken
    data = write_comparisons(tmp_path / "pairs.jsonl", labelled[:12])
    command = ["evaluate", str(folder), "--data", str(data), "--no-progress", "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--controls", "all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    figures = read_json(tmp_path / "run" / "summary.json")["controls"]
    gains = [[figures[name][f"difference{key}"] for key in ("", "_ci95")] for name in ("blind", "swap")]
    assert f"the profile is worth {gained(*gains[0])};" in shown
    assert all(signed(*gain) in shown for gain in gains)
