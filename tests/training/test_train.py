"""Whole runs: what they leave, what continues them, what they refuse."""

import json
import shutil

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.training.config import TrainSettings, load_settings
from prb_jax.training.data import read_training_data
from prb_jax.training.train import train
from tests.training.tiny import config, curve, rows, stopped_at, write_causal_model, write_model, write_rows

STEPS = 8


def numbers(out):
    names = ("loss", "accuracy", "margin", "grad_norm", "reward_min", "reward_max")
    return curve(out, *names), curve(out, "validation_loss")


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """An uninterrupted run with everything trained."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return train(config(model, data), out=out, progress=False)


def test_a_run_leaves_a_model_numbers_and_what_decided_them(whole, data):
    assert {path.name for path in whole.out.iterdir()} == {
        "train.json", "metrics.jsonl", "checkpoints", "tensorboard", "model", "summary.json",
    }  # fmt: skip
    run = json.loads((whole.out / "train.json").read_text())
    assert run["inputs"]["settings"]["steps"] == STEPS
    assert run["inputs"]["data"]["sources"]["data"][0]["files"][data.name].startswith("sha256:")
    assert run["inputs"]["model"]["files"]["model.safetensors"].startswith("sha256:")
    assert run["inputs"]["learning_rate"] == 1e-3
    assert len(run["sessions"]) == 1
    assert [step for step, *_ in curve(whole.out, "loss")] == list(range(1, STEPS + 1))
    assert [step for step, *_ in curve(whole.out, "validation_loss")] == [4, 8]
    summary = whole.summary
    assert summary == json.loads((whole.out / "summary.json").read_text())
    assert summary["trained_parameters"] == summary["parameters"]
    assert summary["pairs_seen"] == STEPS * 8
    assert summary["validation_split_by"] == "user"


def test_records_train_as_a_file_does(model, whole, tmp_path):
    wanted = config(model, "none")
    wanted.data = None
    train(wanted, out=tmp_path / "run", data=(row for row in rows(40)), progress=False)
    assert numbers(tmp_path / "run") == numbers(whole.out)
    described = json.loads((tmp_path / "run" / "train.json").read_text())["inputs"]["data"]["sources"]["data"]
    assert described[0]["sha256"].startswith("sha256:")
    with pytest.raises(prb.RunError, match="data"):
        train(wanted, out=tmp_path / "run", data=rows(39), progress=False)


def test_a_run_is_a_model_and_scores_as_it_did_in_validation(whole):
    rm = prb.load(whole.out)
    assert rm.name == str(whole.out)
    run = json.loads((whole.out / "train.json").read_text())
    settings = load_settings({**run["inputs"]["settings"], **run["sessions"][0]["settings"]})
    held = read_training_data(settings).validation.comparisons
    scores = rm.score(held, profile_posts=0)
    accuracy = np.mean([row[0] > row[1] for row in scores])
    assert accuracy == pytest.approx(whole.summary["validation"]["accuracy"])
    loss = np.mean([np.log1p(np.exp(row[1] - row[0])) for row in scores])
    assert loss == pytest.approx(whole.summary["validation"]["loss"], rel=1e-5)


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_with_the_same_bytes(model, data, whole, tmp_path, monkeypatch, step, capsys):
    out = tmp_path / "stopped"
    with stopped_at(monkeypatch, step):
        stopped = train(config(model, data), out=out, progress=False)
    assert (stopped.stopped_by, stopped.steps, stopped.model) == ("SIGTERM", step, None)
    assert f"SIGTERM: saved at step {step} of {STEPS}" in capsys.readouterr().err
    with pytest.raises(prb.CheckpointError, match="not finished"):
        prb.load(out)
    done = train(config(model, data), out=out, progress=False)
    assert done.stopped_by is None
    assert numbers(out) == numbers(whole.out)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / "model" / name).read_bytes() == (whole.out / "model" / name).read_bytes()
    assert len(json.loads((out / "train.json").read_text())["sessions"]) == 2


def test_a_run_goes_on_from_an_older_checkpoint_if_the_newest_is_damaged(
    model, data, whole, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "damaged"
    with stopped_at(monkeypatch, 5):
        train(config(model, data), out=out, progress=False)
    shutil.rmtree(out / "checkpoints" / "5" / "arrays")
    train(config(model, data), out=out, progress=False)
    said = capsys.readouterr().err
    assert "checkpoint skipped and renamed to damaged-5" in said
    assert "continued from the checkpoint of step 4" in said
    assert numbers(out) == numbers(whole.out)


def test_a_finished_run_is_not_run_again(model, data, whole):
    before = (whole.out / "train.json").read_bytes()
    again = train(config(model, data), out=whole.out, progress=False)
    assert again.summary == whole.summary
    assert (whole.out / "train.json").read_bytes() == before


def test_a_changed_run_is_refused_with_every_difference(model, data, whole, tmp_path):
    changed = config(model, data, steps=9, optimizer__b2=0.9)
    with pytest.raises(prb.RunError) as caught:
        train(changed, out=whole.out, progress=False)
    assert "settings.optimizer.b2: 0.95 -> 0.9" in str(caught.value)
    assert (whole.out / "model").exists()  # a longer run is not begun where anything else differs
    other = write_rows(tmp_path / data.name, rows(41))
    with pytest.raises(prb.RunError, match=r"data\.sources\.data"):
        train(config(model, other), out=whole.out, progress=False)
    # What is kept and where things lie decides nothing.
    moved = config(shutil.copytree(model, tmp_path / "moved"), data, checkpoint__keep_last=7)
    assert train(moved, out=whole.out, progress=False).summary == whole.summary


@pytest.mark.slow
def test_more_steps_lengthen_a_run_wherever_it_stands(model, data, whole, tmp_path, monkeypatch, capsys):
    finished = shutil.copytree(whole.out, tmp_path / "finished")
    train(config(model, data, steps=12), out=finished, progress=False)
    said = capsys.readouterr().err
    assert "continued from the checkpoint of step 8" in said
    assert (
        "lengthened from 8 steps to 12: the learning rate follows the schedule of 8 steps up to there" in said
    )
    stopped = tmp_path / "stopped"
    with stopped_at(monkeypatch, 3):
        train(config(model, data), out=stopped, progress=False)
    with stopped_at(monkeypatch, 10):
        train(config(model, data, steps=12), out=stopped, progress=False)
    result = train(config(model, data, steps=12), out=stopped, progress=False)
    # The result is that of the lengths 8 and 12, wherever the run stood when it was lengthened.
    assert numbers(stopped) == numbers(finished)
    weights = [(out / "model" / "model.safetensors").read_bytes() for out in (stopped, finished)]
    assert weights[0] == weights[1] != (whole.out / "model" / "model.safetensors").read_bytes()
    assert curve(finished, "loss", "learning_rate")[:8] == curve(whole.out, "loss", "learning_rate")
    rates = [rate for _, rate in curve(finished, "learning_rate")]
    assert rates[7] < rates[8] > rates[11]  # the seam of a schedule that falls
    assert [step for step, *_ in curve(finished, "validation_loss")] == [4, 8, 12]
    assert (result.summary["steps"], result.summary["lengths"]) == (12, [8, 12])
    inputs = json.loads((stopped / "train.json").read_text())["inputs"]
    assert (inputs["lengths"], inputs["settings"]["steps"]) == ([8, 12], 12)
    assert not list(tmp_path.glob("*/.model*"))
    before = (stopped / "train.json").read_bytes()
    with pytest.raises(prb.RunError, match=r"steps=10 is less than the 12 of this run, of which 12 are done"):
        train(config(model, data, steps=10), out=stopped, progress=False)
    assert train(config(model, data, steps=12), out=stopped, progress=False).summary == result.summary
    assert (stopped / "train.json").read_bytes() == before


@pytest.mark.slow
def test_a_constant_rate_has_no_seam(model, data, tmp_path):
    constant = {"optimizer__schedule": "constant", "optimizer__warmup_share": 0.0, "validation__every": 2}
    for name, steps in (("two", 2), ("two", 4), ("one", 4)):
        train(config(model, data, steps=steps, **constant), out=tmp_path / name, progress=False)
    for found, expected in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_validations_are_those_of_each_length():
    settings = TrainSettings(steps=30)
    both = [step for step in range(1, 31) if settings.validates_at(step, (20, 30))]
    assert both == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21, 24, 27, 30]


def test_folders_of_something_else_are_refused(model, data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(prb.RunError, match="is a file"):
        train(config(model, data), out=tmp_path / "file")
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "run.json").write_text("{}")
    with pytest.raises(prb.RunError, match=r"has run.json but no train.json"):
        train(config(model, data), out=evaluation)


def test_training_learns_what_can_be_learned(model, data, tmp_path):
    changes = {"optimizer__learning_rate": 3e-3, "validation__fraction": 0.0, "checkpoint__every": 40}
    chosen = config(model, data, steps=40, **changes)
    result = train(chosen, out=tmp_path / "learns", progress=False)
    losses = [loss for _, loss in curve(result.out, "loss")]
    assert np.mean(losses[-5:]) < 0.2 < np.mean(losses[:3])
    assert result.summary["last_tenth"]["accuracy"] > 0.95
    assert result.summary["validation"] is None


@pytest.mark.parametrize("tuning", ["head", "lora"])
def test_frozen_weights_stay_as_they_are(model, data, tmp_path, tuning):
    from safetensors.numpy import load_file

    lora = {"lora__targets": ("q", "down"), "lora__rank": 4}
    chosen = config(model, data, tuning=tuning, method="profile_context", steps=3, **lora)
    result = train(chosen, out=tmp_path / tuning, progress=False)
    before, after = (load_file(path / "model.safetensors") for path in (model, result.out / "model"))
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not np.array_equal(before[name], after[name])}
    assert changed == ({"score"} if tuning == "head" else {"score", "q_proj", "down_proj"})
    assert result.summary["trained_parameters"] < result.summary["parameters"]


def test_a_language_model_gets_a_head_only_if_asked(data, tmp_path):
    causal = write_causal_model(tmp_path / "causal")
    with pytest.raises(prb.CheckpointError, match=r"'Qwen3ForCausalLM'.*no score head.*init_head=true"):
        train(config(causal, data), out=tmp_path / "no", progress=False)
    result = train(config(causal, data, init_head=True, steps=2), out=tmp_path / "yes", progress=False)
    rm = prb.load(result.out)
    assert rm.config.num_labels == 1
    assert rm.config.architectures == ("Qwen3ForSequenceClassification",)


def test_a_head_with_several_outputs_is_refused_or_replaced(data, tmp_path):
    two = write_model(tmp_path / "two", id2label={"0": "a", "1": "b"})
    with pytest.raises(prb.CheckpointError, match=r"2 outputs.*init_head=true"):
        train(config(two, data), out=tmp_path / "no", progress=False)
    result = train(config(two, data, init_head=True, steps=1), out=tmp_path / "yes", progress=False)
    assert prb.load(result.out).config.num_labels == 1


def test_the_tokenizer_of_another_model_is_refused(model, data, tmp_path):
    from tests.tiny_tokenizer import write_tokenizer

    larger = write_tokenizer(tmp_path / "larger", style="metaspace")
    with pytest.raises(prb.CheckpointError, match="not the tokenizer of this model"):
        train(config(model, data, tokenizer=str(larger)), out=tmp_path / "no", progress=False)
    small = write_model(tmp_path / "small", vocab_size=40)
    with pytest.raises(prb.CheckpointError, match=r"only 40 embeddings.*not the tokenizer"):
        train(config(small, data), out=tmp_path / "small-run", progress=False)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_comparisons(model, tmp_path):
    found = rows(12)
    found[5]["margin"] = 3e38
    chosen = config(model, write_rows(tmp_path / "huge.jsonl", found), validation__fraction=0.0)
    with pytest.raises(prb.RunError) as caught:
        train(chosen, out=tmp_path / "run", progress=False)
    assert "not finite" in str(caught.value)
    assert "'p5'" in str(caught.value)
    assert not (tmp_path / "run" / "model").exists()
    assert all(np.isfinite(loss) for _, loss in curve(tmp_path / "run", "loss"))


@pytest.mark.slow
def test_from_scratch_with_a_tokenizer_of_its_own(data, tmp_path):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 300,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    chosen = config("scratch", data, steps=2, **{f"scratch__{name}": size for name, size in sizes.items()})
    result = train(chosen, out=tmp_path / "scratch", progress=False)
    rm = prb.load(result.out)
    assert rm.config.hidden_size == 16
    assert rm.tokenizer.vocab_size <= 300 <= rm.config.vocab_size
    again = train(chosen, out=tmp_path / "again", progress=False)
    assert numbers(again.out) == numbers(result.out)


@pytest.mark.slow
def test_bfloat16_trains_float32_weights(model, data, tmp_path):
    result = train(config(model, data, dtype="bfloat16", steps=3), out=tmp_path / "half", progress=False)
    rm = prb.load(result.out)
    assert rm.dtype == "bfloat16"
    assert str(rm.params["score"].dtype) == "float32"
    assert all(np.isfinite(loss) for _, loss in curve(result.out, "loss"))
