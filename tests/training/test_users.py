"""Runs with a soft prompt for each user."""

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.personal.prompts import load_prompts
from prb_jax.training.convert import convert
from prb_jax.training.train import train
from tests.training.tiny import config, curve, rows, stopped_at, validated, write_rows

STEPS = 160


def opposed(count: int = 64):
    """Every other user prefers what the rest rejects, so that nobody can tell without knowing the user."""
    pairs = rows(count, users=4)
    for row in pairs:
        if row["user_id"] in ("u1", "u3"):
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return pairs


@pytest.fixture(scope="module")
def wanted(model, tmp_path_factory):
    """The config of a run over opposed users, with changes."""
    data = write_rows(tmp_path_factory.mktemp("data") / "opposed.jsonl", opposed())
    given = {
        "steps": STEPS, "batch__comparisons": 16, "optimizer__learning_rate": 1e-2, "user_embedding__tokens": 2,
        "user_embedding__generic_share": 0.1, "validation__every": 80, "checkpoint__every": 40,
        "method": "persona_embedding", "validation__by": "id",
    }  # fmt: skip
    return lambda *, model=model, data=data, **changes: config(model, data, **{**given, **changes})


@pytest.fixture(scope="module")
def whole(wanted, tmp_path_factory):
    return train(wanted(), out=tmp_path_factory.mktemp("runs") / "whole", progress=False)


def test_users_are_told_apart_others_get_the_generic_prompt_and_all_score_as_in_validation(whole):
    rm = prb.load(whole.out)
    pair = {"question": "tea or rain?", "responses": ["yes tea", "no tea"], "labels": [1, 0]}
    users = ("u0", "u2", "u1", "u3", "stranger", None)
    asked = [prb.Comparison(id=str(user), user_id=user, **pair) for user in users]
    margins = [row[0] - row[1] for row in rm.score(asked, profile_posts=0)]
    assert min(margins[:2]) > 0.5
    assert max(margins[2:4]) < -0.5
    assert margins[4] == margins[5]
    assert margins[4] not in margins[:4]
    assert len(rm.reader.unknown_users(asked) or ()) == 1
    assert whole.summary["users"] == 4
    chosen, rejected = validated(whole).T
    loss = np.mean(np.log1p(np.exp(rejected - chosen)))
    assert loss == pytest.approx(whole.summary["validation"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bytes_users_included(wanted, whole, tmp_path, monkeypatch):
    out = tmp_path / "stopped"
    with stopped_at(monkeypatch, 100):
        train(wanted(), out=out, progress=False)
    train(wanted(), out=out, progress=False)
    assert curve(out, "loss", "user_grad_norm") == curve(whole.out, "loss", "user_grad_norm")
    for name in ("model.safetensors", "users.safetensors", "users.json"):
        assert (out / "model" / name).read_bytes() == (whole.out / "model" / name).read_bytes()


def test_a_run_is_converted_with_its_users(whole, tmp_path):
    folder = convert(whole.out, tmp_path / "converted")
    again = convert(folder, tmp_path / "again")  # and so is the folder of its model
    for name in ("model.safetensors", "users.safetensors", "users.json"):
        assert (folder / name).read_bytes() == (whole.model / name).read_bytes()
        assert (again / name).read_bytes() == (whole.model / name).read_bytes()


def test_a_run_that_would_lose_soft_prompts_is_refused(wanted, whole, tmp_path):
    chosen = wanted(model=whole.out, method="user_blind")
    message = r"holds soft prompts of users \(users\.safetensors\), which a new"
    with pytest.raises(prb.CheckpointError, match=message):
        train(chosen, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_adapter_without_its_soft_prompts_is_refused(wanted, tmp_path, capsys):
    run = train(wanted(tuning="lora", steps=1), out=tmp_path / "run", progress=False).out
    assert main(["convert", str(run), str(tmp_path / "adapter"), "--adapter"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{run}: method=persona_embedding trained soft prompts of its users" in said
    assert not (tmp_path / "adapter").exists()


def test_with_a_frozen_model_only_head_and_prompts_move(wanted, model, tmp_path):
    from safetensors.numpy import load_file

    result = train(wanted(tuning="head", steps=3), out=tmp_path / "head", progress=False)
    before, after = (load_file(path / "model.safetensors") for path in (model, result.model))
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {"score.weight"}
    saved = load_prompts(result.model, width=32)
    assert saved is not None
    assert len({row.tobytes() for row in saved.table}) == 5  # each has moved its own way
    assert result.summary["trained_parameters"] == 32 + 5 * 2 * 32


def test_data_without_users_is_refused(wanted, tmp_path):
    without = write_rows(tmp_path / "without.jsonl", [{**row, "user_id": None} for row in rows(8)])
    with pytest.raises(prb.DataError, match="no comparison of the training data has a user_id"):
        train(wanted(data=without), out=tmp_path / "run", progress=False)
