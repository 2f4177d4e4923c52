"""Whole runs: what they leave, what continues them, what they refuse."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import prb_jax as prb
from prb_jax.models.checkpoints.exported import check_exported
from prb_jax.runs.training import read_training
from prb_jax.training.config import TrainSettings
from prb_jax.training.train import train
from tests.sweeps import sweep
from tests.tiny_tokenizer import write_tokenizer
from tests.training.tiny import (
    config,
    curve,
    record,
    rows,
    stopped_at,
    validated,
    write_causal_model,
    write_model,
    write_rows,
)

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
    run = record(whole.out)
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
    described = record(tmp_path / "run")["inputs"]["data"]["sources"]["data"]
    assert described[0]["sha256"].startswith("sha256:")
    with pytest.raises(prb.RunError, match="data"):
        train(wanted, out=tmp_path / "run", data=rows(39), progress=False)


def test_a_run_is_a_model_and_scores_as_it_did_in_validation(whole):
    assert prb.load(whole.out).name == str(whole.out)
    chosen, rejected = validated(whole).T
    validation = whole.summary["validation"]
    assert np.mean(chosen > rejected) == pytest.approx(validation["accuracy"])
    assert np.mean(np.log1p(np.exp(rejected - chosen))) == pytest.approx(validation["loss"], rel=1e-5)


@pytest.mark.parametrize(("step", "damaged"), sweep([(3, False), (5, True)], few=(1,)))
def test_an_interrupted_run_ends_with_the_same_bytes(
    model, data, whole, tmp_path, monkeypatch, step, damaged, capsys
):
    """Also where its newest checkpoint is damaged: it goes on from the older one."""
    out = tmp_path / "stopped"
    with stopped_at(monkeypatch, step):
        stopped = train(config(model, data), out=out, progress=False)
    assert (stopped.stopped_by, stopped.steps, stopped.model) == ("SIGTERM", step, None)
    assert f"SIGTERM: saved at step {step} of {STEPS}" in capsys.readouterr().err
    with pytest.raises(prb.CheckpointError, match="not finished"):
        prb.load(out)
    if damaged:
        shutil.rmtree(out / "checkpoints" / str(step) / "arrays")
    done = train(config(model, data), out=out, progress=False)
    said = capsys.readouterr().err
    assert f"continued from the checkpoint of step {4 if damaged else step}" in said
    assert (f"checkpoint skipped and renamed to damaged-{step}" in said) == damaged
    assert done.stopped_by is None
    assert numbers(out) == numbers(whole.out)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / "model" / name).read_bytes() == (whole.out / "model" / name).read_bytes()
    assert len(record(out)["sessions"]) == 2


def test_a_finished_run_is_not_run_again(model, data, whole):
    before = (whole.out / "train.json").read_bytes()
    again = train(config(model, data), out=whole.out, progress=False)
    assert again.summary == whole.summary
    assert (whole.out / "train.json").read_bytes() == before


def test_what_a_run_wrote_is_compared_when_it_is_read(model, data, whole, tmp_path):
    """Every file of the model with any byte flipped, and the numbers of the run."""
    out = shutil.copytree(whole.out, tmp_path / "run")
    prb.load(out)
    for name in sorted(path.name for path in (out / "model").iterdir()):
        path, rng = out / "model" / name, np.random.default_rng(0)
        before = path.read_bytes()
        for place in rng.integers(0, len(before), 3).tolist():
            path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
            with pytest.raises(prb.CheckpointError):
                prb.load(out)
            with pytest.raises(prb.CheckpointError, match=f"{name}: is not the file that the run wrote"):
                check_exported(out / "model")
        path.write_bytes(before)
    prb.load(out)
    for name in ("metrics.jsonl", "summary.json"):
        before = (out / name).read_text()
        (out / name).write_text(before.replace('"loss": 0.', '"loss": 0.1', 1))
        for act in (lambda: train(config(model, data), out=out, progress=False), lambda: read_training(out)):
            with pytest.raises(prb.RunError, match=f"{name}: is not the file that the run wrote"):
                act()
        (out / name).write_text(before)
    record = json.loads((out / "train.json").read_text())
    del record["files"]
    (out / "train.json").write_text(json.dumps(record))
    with pytest.raises(
        prb.RunError, match=r"field 'files': expected the digest of summary\.json, found nothing"
    ):
        read_training(out)
    (out / "train.json").write_text(json.dumps(record | {"format": 1}))  # as of an earlier version
    (out / "model" / "README.md").write_text("mine")
    assert read_training(out).summary == whole.summary
    prb.load(out)


def test_a_model_that_was_deleted_is_exported_again(model, data, whole, tmp_path):
    out = shutil.copytree(whole.out, tmp_path / "run")
    shutil.rmtree(out / "model")
    with pytest.raises(
        prb.CheckpointError, match="model of this training run was deleted: the same command exports"
    ):
        prb.load(out)
    with pytest.raises(prb.RunError, match=r"settings\.seed: 0 -> 1"):
        train(config(model, data, seed=1), out=out, progress=False)
    assert (out / "summary.json").exists()
    again = train(config(model, data), out=out, progress=False)
    assert again.model == out / "model"
    assert again.summary == whole.summary
    for path in (whole.out / "model").iterdir():
        assert (out / "model" / path.name).read_bytes() == path.read_bytes()
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(
        prb.RunError, match="its model was deleted, and there is no checkpoint to export it from"
    ):
        train(config(model, data), out=out, progress=False)


def test_a_checkpoint_of_another_run_is_refused(model, data, whole, tmp_path, monkeypatch):
    out, other = tmp_path / "run", tmp_path / "other"
    with stopped_at(monkeypatch, 3):
        train(config(model, data), out=out, progress=False)
    with stopped_at(monkeypatch, 4):
        train(config(model, data, seed=1), out=other, progress=False)
    shutil.copytree(other / "checkpoints" / "4", out / "checkpoints" / "4")
    with pytest.raises(prb.RunError, match="checkpoints/4: is the checkpoint of another run"):
        train(config(model, data), out=out, progress=False)
    shutil.rmtree(out / "checkpoints" / "4")
    assert train(config(model, data), out=out, progress=False).summary == whole.summary
    shutil.copytree(other / "checkpoints" / "4", out / "checkpoints" / "5")
    with pytest.raises(prb.RunError, match=r"checkpoints/5: cannot be read: .*another step"):
        prb.convert(out, tmp_path / "converted", step=5)


def test_a_changed_run_is_refused_with_every_difference(model, data, whole, tmp_path):
    changed = config(model, data, steps=9, optimizer__b2=0.9)
    with pytest.raises(prb.RunError, match=r"settings.optimizer.b2: 0.95 -> 0.9"):
        train(changed, out=whole.out, progress=False)
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
        "lengthened from 8 steps to 12: the learning rate follows the schedule of 8 steps until then" in said
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
    inputs = record(stopped)["inputs"]
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
    for lengthened, expected in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        np.testing.assert_allclose(lengthened, expected, rtol=1e-5, atol=1e-5)


def test_validations_are_those_of_each_length():
    settings = TrainSettings(steps=30)
    both = [step for step in range(1, 31) if settings.validates_at(step, (20, 30))]
    assert both == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21, 24, 27, 30]


def test_folders_of_something_else_are_refused(model, data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(prb.RunError, match="is a file"):
        train(config(model, data), out=tmp_path / "file")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(prb.RunError, match=r"has run.json but no train.json"):
        train(config(model, data), out=tmp_path)


def test_training_learns_what_can_be_learned(model, data, tmp_path):
    changes = {"optimizer__learning_rate": 3e-3, "validation__fraction": 0.0, "checkpoint__every": 40}
    chosen = config(model, data, steps=40, **changes)
    result = train(chosen, out=tmp_path / "learns", progress=False)
    losses = [loss for _, loss in curve(result.out, "loss")]
    assert np.mean(losses[-5:]) < 0.2 < np.mean(losses[:3])
    assert result.summary["last_tenth"]["accuracy"] > 0.95
    assert result.summary["validation"] is None


def test_frozen_weights_stay_as_they_are(model, data, tmp_path):
    lora = {"tuning": "lora", "lora__targets": ("q", "down"), "lora__rank": 4}
    chosen = config(model, data, method="profile_context", steps=3, **lora)
    result = train(chosen, out=tmp_path / "run", progress=False)
    before, after = (load_file(path / "model.safetensors") for path in (model, result.out / "model"))
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"score", "q_proj", "down_proj"}
    assert result.summary["trained_parameters"] < result.summary["parameters"]


def test_a_head_is_made_only_if_asked(data, tmp_path):
    """For a language model, and in place of a head with several outputs."""
    causal = write_causal_model(tmp_path / "causal")
    two = write_model(tmp_path / "two", id2label={"0": "a", "1": "b"})
    for folder, message in ((causal, "'Qwen3ForCausalLM'.*no score head"), (two, "2 outputs")):
        with pytest.raises(prb.CheckpointError, match=rf"{message}.*init_head=true"):
            train(config(folder, data), out=tmp_path / "no", progress=False)
        out = tmp_path / f"{folder.name}-run"
        rm = prb.load(train(config(folder, data, init_head=True, steps=1), out=out, progress=False).out)
        assert rm.config.num_labels == 1
        assert rm.config.architectures == ("Qwen3ForSequenceClassification",)


def test_the_tokenizer_of_another_model_is_refused(model, data, tmp_path):
    larger = write_tokenizer(tmp_path / "larger", style="metaspace")
    with pytest.raises(prb.CheckpointError, match="not the tokenizer of this model"):
        train(config(model, data, tokenizer=str(larger)), out=tmp_path / "no", progress=False)
    small = write_model(tmp_path / "small", vocab_size=40)
    with pytest.raises(prb.CheckpointError, match=r"only 40 embeddings.*not the tokenizer"):
        train(config(small, data), out=tmp_path / "small-run", progress=False)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_comparisons(model, tmp_path):
    pairs = rows(12)
    pairs[5]["margin"] = 3e38
    chosen = config(model, write_rows(tmp_path / "huge.jsonl", pairs), validation__fraction=0.0)
    with pytest.raises(prb.RunError, match=r"not finite.*'p5'"):
        train(chosen, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "model").exists()
    assert all(np.isfinite(loss) for _, loss in curve(tmp_path / "run", "loss"))


@pytest.mark.slow
def test_from_scratch_with_a_tokenizer_of_its_own(data, tmp_path):
    layers = {"scratch__num_hidden_layers": 1, "scratch__head_dim": 8, "scratch__vocab_size": 300}
    widths = {"scratch__hidden_size": 16, "scratch__intermediate_size": 32}
    chosen = config("scratch", data, steps=2, **layers, **widths)
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
