"""A small decoder and streams of random trees, for tests of the training step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prb_jax.models.config.decoder import DecoderConfig, parse_config
from prb_jax.models.decoder import Params
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.model import init_params
from prb_jax.personal.method import NULL, TrainedMethod, Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.platform.meshes import make_mesh
from prb_jax.training.config import LossSettings, OptimizerSettings, TrainSettings
from prb_jax.training.losses import Extras
from prb_jax.training.step import TrainStep
from prb_jax.training.train import make_reward_step
from prb_jax.training.trainer import USER
from prb_jax.training.weights import trained_decoder
from prb_jax.trees.packing import READS_STEP, pack_streams, pack_together
from prb_jax.trees.streams import PackedBatch, StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import BLOCK, Tree, build_tree
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


def packed_of(trees: Sequence[Tree], *, streams: int = 1, tokens: int | None = None) -> PackedBatch:
    """One batch of as many streams at most, as short as can be or of so many tokens."""
    options = StreamOptions(tokens=BLOCK, streams=streams)
    if tokens is None:
        return pack_together(trees, options)
    (packed,) = pack_streams(trees, StreamShape(tokens, READS_STEP), options)
    return packed


def batch_of(
    trees: Sequence[Tree], *, streams: int = 1, tokens: int | None = None, window: int | None = None
) -> StreamBatch:
    """The arrays of :func:`packed_of`, for a model whose sliding layers have this window."""
    packed = packed_of(trees, streams=streams, tokens=tokens)
    return make_stream_batch(trees, packed, StreamOptions(tokens=BLOCK, streams=streams, window=window))


def extras_of(
    trees: Sequence[Tree],
    *,
    streams: int = 1,
    tokens: int | None = None,
    margin: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    seed: int = 0,
) -> Extras:
    """Of :func:`batch_of` with room for twice the trees: labels fall from the first response to the last; margins and
    weights of the trees are random, unless they are given."""
    rng, rows = np.random.default_rng(seed), 2 * len(trees)
    of_trees = [rng.uniform(0, 0.5, len(trees)), rng.uniform(0.5, 2.0, len(trees))]
    given = [
        one if one is not None else drawn for one, drawn in zip((margin, weights), of_trees, strict=True)
    ]
    shape = (streams, rows, max(len(tree.responses) for tree in trees))
    mask, places = np.zeros(shape, bool), np.zeros(shape, np.int32)
    margins, weighted = np.zeros((2, *shape[:2]), np.float32)
    for row, stream in enumerate(packed_of(trees, streams=streams, tokens=tokens)):
        read = 0
        for place, member in enumerate(stream.members):
            count = len(trees[member].responses)
            mask[row, place, :count], places[row, place, :count] = True, np.arange(read, read + count)
            margins[row, place], weighted[row, place] = (values[member] for values in given)
            read += count
    labels = np.broadcast_to(np.arange(shape[2], 0, -1, dtype=np.float32), shape)
    return Extras(labels=labels, mask=mask, margin=margins, weights=weighted, places=places)


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
) -> tuple[TrainStep, dict[str, Any], Params]:
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
    model = trained_decoder(settings, config, mesh=mesh)
    step = make_reward_step(settings, model, mesh=mesh, lengths=(steps,), method=method)
    state, frozen = step.begin(initial_params(config) if params is None else params)
    return step, state, jax.device_put(frozen, step.frozen_shardings)


@functools.cache
def built(tuning: str = "full", *, layers: int = 2) -> TrainStep:
    """The step of :func:`build`, once for all tests; see :func:`fresh`."""
    return build(small_config(num_hidden_layers=layers), tuning=tuning)[0]


def fresh(tuning: str = "full", *, layers: int = 2) -> tuple[dict[str, Any], Params]:
    """A new state of :func:`built`, and the frozen parameters."""
    step = built(tuning, layers=layers)
    state, frozen = step.begin(initial_params(small_config(num_hidden_layers=layers)))
    return state, jax.device_put(frozen, step.frozen_shardings)


def taken(
    state: dict[str, Any], ids: np.ndarray, *, step: TrainStep, method: TrainedMethod
) -> dict[str, Any]:
    """The state with these rows of users as those of the step."""
    take = jax.jit(method.take, out_shardings=step.state_shardings[USER])
    return {**state, USER: take(state[USER], ids)}


@functools.cache
def initial_params(config: DecoderConfig) -> Params:
    return jax.jit(lambda: init_params(config))()
