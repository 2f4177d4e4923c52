"""A small decoder and batches of random trees, for tests of the training step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prb_jax.models.config.decoder import DecoderConfig, parse_config
from prb_jax.models.decoder import Params
from prb_jax.models.lora import LoraConfig
from prb_jax.models.random_params import init_params
from prb_jax.personal.method import NULL, TrainedMethod, Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.sharding import make_mesh
from prb_jax.training.config import LossSettings, OptimizerSettings, TrainSettings
from prb_jax.training.objective import Extras, RewardStep, make_reward_step
from prb_jax.trees.batches import Bucket, TreeBatch, make_batch
from prb_jax.trees.shapes import round_up
from prb_jax.trees.tree import Tree, build_tree
from tests.training.tiny import CONFIG

LORA = LoraConfig(rank=4, alpha=8.0)

WINDOWED: dict[str, Any] = {
    "architectures": ["Gemma2ForSequenceClassification"], "model_type": "gemma2", "sliding_window": 20,
    "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
"""What makes :func:`small_config` a Gemma 2: windows that slide and capped logits."""


def small_config(**changes: Any) -> DecoderConfig:
    """Qwen 3 with two layers; a head dimension that is not width / heads."""
    raw = {name: value for name, value in CONFIG.items() if name not in ("id2label", "torch_dtype")}
    raw |= {"vocab_size": 64, "head_dim": 16, "num_labels": 1, **changes}
    return parse_config(raw, where="test")


def soft_prompts(users: Sequence[str], *, places: int, generic_share: float, **adam: float) -> SoftPrompts:
    """Of three tokens, for :func:`small_config`."""
    return SoftPrompts(
        table=Users(tuple(users)),
        tokens=3,
        width=32,
        places=places,
        generic_share=generic_share,
        seed=0,
        optimizer=RowAdam(learning_rate=lambda step: 0.1, **adam),
        mesh=make_mesh(devices=jax.devices()[:1]),
    )


def random_trees(count: int, *, responses: int = 2, seed: int = 0, prefix: int = 24) -> list[Tree]:
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(count):
        shared = rng.integers(10, 64, rng.integers(prefix // 2, prefix + 1)).tolist()
        ids = [[k, *rng.integers(10, 64, rng.integers(3, 11)).tolist()] for k in range(responses)]
        trees.append(build_tree([shared + response for response in ids]))
    return trees


def batch_of(trees: Sequence[Tree], *, rows: int | None = None, bucket: Bucket | None = None) -> TreeBatch:
    """Without a bucket, lengths are rounded up: as many random trees are one shape, and so one program."""
    if bucket is None:
        tops = [max(sizes) for sizes in zip(*(tree.shape for tree in trees), strict=True)]
        bucket = Bucket(round_up(max(tops[0], 1), 8), tops[1], round_up(tops[2], 4))
    return make_batch(trees, bucket, batch=rows or len(trees))


def extras_of(
    trees: Sequence[Tree], *, rows: int | None = None, responses: int | None = None, seed: int = 0
) -> Extras:
    """Labels fall from the first response to the last; margins and weights are random."""
    rng = np.random.default_rng(seed)
    shape = (rows or len(trees), responses or max(len(tree.responses) for tree in trees))
    mask = np.zeros(shape, bool)
    for row, tree in enumerate(trees):
        mask[row, : len(tree.responses)] = True
    return Extras(
        labels=np.tile(np.arange(shape[1], 0, -1, dtype=np.float32), (shape[0], 1)),
        mask=mask,
        margin=rng.uniform(0, 0.5, shape[0]).astype(np.float32),
        weights=rng.uniform(0.5, 2.0, shape[0]).astype(np.float32),
        users=np.zeros(shape[0], np.int32),
    )


def rows_of(extras: Extras, rows: slice) -> Extras:
    return jax.tree.map(lambda value: value[rows], extras)


def build(
    config: DecoderConfig,
    *,
    tuning: Any = "full",
    params: Params | None = None,
    mesh: Any = None,
    dtype: str = "float32",
    loss: LossSettings | None = None,
    steps: int = 20,
    method: TrainedMethod = NULL,
    **options: Any,
) -> tuple[RewardStep, dict[str, Any], Params]:
    """The compiled functions, a fresh state and the frozen parameters."""
    settings = TrainSettings(
        tuning=tuning,
        lora=LORA,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        loss=loss or LossSettings(center_rewards_coefficient=0.01),
        optimizer=OptimizerSettings(learning_rate=1e-2, weight_decay=0.01, b2=0.999, warmup_share=0.0),
        **{"remat": "none", **options},
    )
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    step = make_reward_step(settings, config, mesh=mesh, lengths=(steps,), method=method)
    state, frozen = step.begin(initial_params(config) if params is None else params)
    return step, state, jax.device_put(frozen, step.frozen_shardings)


@functools.cache
def built(tuning: str = "full", *, layers: int = 2) -> RewardStep:
    """The step of :func:`build`, once for all tests; see :func:`fresh`."""
    return build(small_config(num_hidden_layers=layers), tuning=tuning)[0]


def fresh(tuning: str = "full", *, layers: int = 2) -> tuple[dict[str, Any], Params]:
    """A new state of :func:`built`, and the frozen parameters."""
    step = built(tuning, layers=layers)
    state, frozen = step.begin(initial_params(small_config(num_hidden_layers=layers)))
    return state, jax.device_put(frozen, step.frozen_shardings)


@functools.cache
def initial_params(config: DecoderConfig) -> Params:
    return jax.jit(lambda: init_params(config))()
