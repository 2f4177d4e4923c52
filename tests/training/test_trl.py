"""One step against TRL's RewardTrainer and transformers' classifiers: the same loss, the same gradients."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from prb_jax.models.checkpoints.hf_map import flatten, leaf_maps
from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.config.decoder import load_config
from prb_jax.models.decoder import Params
from prb_jax.training.config import LossSettings
from prb_jax.training.step import TrainStep
from prb_jax.training.trainer import USER, WEIGHTS
from prb_jax.trees.tree import Tree, build_tree
from tests.sweeps import sweep
from tests.tiny_models import write_tiny_model
from tests.tiny_tokenizer import write_tokenizer
from tests.training.small_batches import batch_of, build, extras_of

torch = pytest.importorskip("torch")

FAMILIES = ("qwen3", "llama", "gemma3")
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4  # of each tensor's norm
CENTER = 0.01


def pairs() -> list[Tree]:
    rng = np.random.default_rng(0)
    trees = []
    for prefix, *lengths in ((40, 12, 20), (71, 25, 9), (55, 5, 6), (90, 30, 31)):
        shared = rng.integers(3, 256, prefix)
        responses = [[3 + k, *rng.integers(3, 256, n - 1)] for k, n in enumerate(lengths)]
        trees.append(build_tree([[*shared, *response] for response in responses]))
    return trees


MARGINS = np.array([0.5, 0.0, 0.25, 1.0], np.float32)


@functools.cache
def compiled(folder: Path, center: float | None) -> tuple[TrainStep, Params]:
    config = load_config(folder)
    params = load_params(folder, config).params
    loss = LossSettings(center_rewards_coefficient=center)
    return build(config, params=params, loss=loss, remat="dots")[0], params


def our_step(
    folder: Path, *, margin: bool, center: float | None
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The metrics of a step, and its gradients by the tensors' names in the checkpoint."""
    config, trees = load_config(folder), pairs()
    step, params = compiled(folder, center)
    extras = extras_of(trees, margin=MARGINS if margin else np.zeros(4), weights=np.ones(4))
    state = step.init({WEIGHTS: params, USER: params["embed"]})
    batch = batch_of(trees, window=config.sliding_window)
    added = step.gradients(state, {}, *step.place(batch, extras))
    sums = flatten(jax.tree.map(lambda leaf: np.asarray(leaf) / 4, added.gradient[WEIGHTS]))
    gradients = {}
    for leaf in leaf_maps(config):
        parts = sums[leaf.path] if leaf.stacked else [sums[leaf.path]]
        for key, value in zip(leaf.file_keys, parts, strict=True):
            gradients[key] = value.T if leaf.transposed else value
    metrics = step.update(state, added)[1]
    return {name: float(value) for name, value in metrics.items()}, gradients


def classifier(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def compare(folder: Path, model: Any, loss: Any, *, margin: bool, center: float | None) -> dict[str, float]:
    """Our step against a loss of theirs and its gradients; returns our metrics."""
    loss.backward()
    weights = model.named_parameters()
    theirs = {name: weight.grad.numpy() for name, weight in weights if weight.grad is not None}
    metrics, ours = our_step(folder, margin=margin, center=center)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=LOSS_TOLERANCE)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert np.linalg.norm(gradient) > 0, name
        difference = np.linalg.norm(ours[name] - gradient) / np.linalg.norm(gradient)
        assert difference < GRADIENT_TOLERANCE, (name, difference)
    return metrics


@pytest.fixture(scope="module", params=sweep(FAMILIES, few=(0, 2)))
def folder(request, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    write_tiny_model(place, request.param)
    write_tokenizer(place)
    return place


@pytest.mark.parametrize(
    ("folder", "margin"),
    sweep(itertools.product(FAMILIES, (False, True)), few=(0, 1, 5)),
    indirect=["folder"],
)
def test_one_step_equals_the_trainer_of_trl(folder: Path, margin: bool, tmp_path: Path) -> None:
    """The trainer collates, pads and computes; only its data loader is left out."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from transformers import AutoTokenizer

    columns: dict[str, Any] = {
        "chosen_ids": [tree.sequence(0).tolist() for tree in pairs()],
        "rejected_ids": [tree.sequence(1).tolist() for tree in pairs()],
    }
    if margin:
        columns["margin"] = MARGINS.tolist()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = trl.RewardTrainer(
        model=classifier(folder),
        args=trl.RewardConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            center_rewards_coefficient=CENTER, max_length=None,
        ),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator([dict(trainer.train_dataset[i]) for i in range(4)])
    assert ("margin" in batch) == margin
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    metrics = compare(folder, trainer.model, loss, margin=margin, center=CENTER)
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-5)
    assert metrics["margin"] == pytest.approx(theirs["margin"], abs=1e-5)
    for name in ("mean", "min", "max"):
        assert metrics[f"reward_{name}"] == pytest.approx(theirs[f"{name}_reward"], abs=1e-5), name
