"""One step against TRL's RewardTrainer and transformers' classifiers: the same loss, the same gradients."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from prb_jax.checkpoints.hf_map import flatten, leaf_maps
from prb_jax.checkpoints.load import load_params
from prb_jax.models.config.decoder import load_config
from prb_jax.models.decoder import Params
from prb_jax.training.config import LossSettings
from prb_jax.training.objective import USER, WEIGHTS, Extras
from prb_jax.training.step import TrainStep
from prb_jax.trees.tree import Tree, build_tree
from tests.sweeps import sweep
from tests.tiny_models import write_tiny_model
from tests.tiny_tokenizer import write_tokenizer
from tests.training.small_batches import batch_of, build

torch = pytest.importorskip("torch")

FAMILIES = ("qwen3", "llama", "gemma3")
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4  # of each tensor's norm
CENTER = 0.01


def pairs() -> list[Tree]:
    rng = np.random.default_rng(0)
    trees = []
    for prefix, chosen, rejected in ((40, 12, 20), (71, 25, 9), (55, 5, 6), (90, 30, 31)):
        shared = rng.integers(3, 256, prefix)
        ids = [
            np.concatenate([shared, [3 + k], rng.integers(3, 256, n - 1)])
            for k, n in enumerate((chosen, rejected))
        ]
        trees.append(build_tree(ids))
    return trees


MARGINS = np.array([0.5, 0.0, 0.25, 1.0], np.float32)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one of our steps gave; gradients by the tensors' names in the checkpoint."""

    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]


@functools.cache
def compiled(folder: Path, center: float | None) -> tuple[TrainStep, Params]:
    config = load_config(folder)
    params = load_params(folder, config).params
    loss = LossSettings(center_rewards_coefficient=center)
    return build(config, params=params, loss=loss, remat="dots")[0], params


def our_step(folder: Path, *, margin: bool, center: float | None) -> Step:
    config, trees = load_config(folder), pairs()
    step, params = compiled(folder, center)
    extras = Extras(
        labels=np.tile(np.array([1, 0], np.float32), (4, 1)),
        mask=np.ones((4, 2), bool),
        margin=MARGINS if margin else np.zeros(4, np.float32),
        weights=np.ones(4, np.float32),
        users=np.zeros(4, np.int32),
    )
    state = step.accumulate(
        step.init({WEIGHTS: params, USER: params["embed"]}), {}, *step.place(batch_of(trees), extras)
    )
    sums = flatten(jax.tree.map(lambda leaf: np.asarray(leaf) / 4, state["acc"][WEIGHTS]))
    gradients = {}
    for leaf in leaf_maps(config):
        parts = sums[leaf.path] if leaf.stacked else [sums[leaf.path]]
        for key, value in zip(leaf.file_keys, parts, strict=True):
            gradients[key] = value.T if leaf.transposed else value
    metrics = step.update(state)[1]
    return Step({name: float(value) for name, value in metrics.items()}, gradients)


def padded(trees: list[Tree]) -> dict[str, Any]:
    """Chosen first, then rejected, padded on the right."""
    sequences = [tree.sequence(k) for k in (0, 1) for tree in trees]
    longest = max(len(ids) for ids in sequences)
    ids = np.zeros((len(sequences), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def classifier(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def gradients_of(model: Any) -> dict[str, np.ndarray]:
    return {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.grad is not None}


def compare(ours: Step, loss: float, gradients: dict[str, np.ndarray]) -> None:
    assert ours.metrics["loss"] == pytest.approx(loss, abs=LOSS_TOLERANCE)
    assert ours.gradients.keys() == gradients.keys()
    for name, theirs in gradients.items():
        assert np.linalg.norm(theirs) > 0, name
        difference = np.linalg.norm(ours.gradients[name] - theirs) / np.linalg.norm(theirs)
        assert difference < GRADIENT_TOLERANCE, (name, difference)


@pytest.fixture(scope="module", params=sweep(FAMILIES, few=(0, 2)))
def folder(request, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    write_tiny_model(place, request.param)
    write_tokenizer(place)
    return place


@pytest.mark.parametrize(("margin", "center"), [(False, None), (True, CENTER)])
def test_one_step_equals_the_formula_in_torch(folder: Path, margin: bool, center: float | None) -> None:
    model = classifier(folder)
    rewards = model(**padded(pairs()), use_cache=False).logits.squeeze(-1)
    chosen, rejected = torch.chunk(rewards, 2)
    difference = chosen - rejected - (torch.from_numpy(MARGINS) if margin else 0.0)
    loss = -torch.nn.functional.logsigmoid(difference).mean()
    if center is not None:
        loss = loss + center * torch.mean((chosen + rejected) ** 2)
    loss.backward()
    compare(our_step(folder, margin=margin, center=center), loss.item(), gradients_of(model))


@pytest.mark.parametrize("margin", [False, True])
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
    loss.backward()
    ours = our_step(folder, margin=margin, center=CENTER)
    compare(ours, loss.item(), gradients_of(trainer.model))
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    for name, same in {
        "accuracy": "accuracy",
        "margin": "margin",
        "reward_mean": "mean_reward",
        "reward_min": "min_reward",
        "reward_max": "max_reward",
    }.items():
        assert ours.metrics[name] == pytest.approx(theirs[same], abs=1e-5), name
