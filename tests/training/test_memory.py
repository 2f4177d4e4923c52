"""Memory of a step: the estimate, against what JAX keeps for a backward pass; and the choice of `remat=auto`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.behaviour.rl.objective import Actor
from prb_jax.behaviour.rl.sections import ValueSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.measure.plan.program import executed_flops
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.named_shapes import read_model
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.meshes import make_mesh
from prb_jax.training import memory
from prb_jax.training.config import TrainSettings
from prb_jax.training.memory import BUSY_TOKENS, StepMemory
from prb_jax.training.weights import TrainedModel, trained_decoder
from tests.sweeps import sweep
from tests.training.small_batches import batch_of, build, extras_of, random_trees, small_config

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
WIDE, THINNER = (small_config(**SIZES, num_hidden_layers=layers) for layers in (3, 2))
GB = 1e9


def trained(config: DecoderConfig, **settings: Any) -> TrainedModel:
    return trained_decoder(TrainSettings(**settings), config, mesh=make_mesh(devices=jax.devices()[:1]))


def kept_by_jax(remat: str, dtype: str, layers: int, tokens: int) -> int:
    """Bytes that a forward pass keeps for its backward pass, from the traced program."""
    config = WIDE if layers == 3 else THINNER
    model = trained(config, tuning="full", remat=remat, dtype=dtype)
    batch = batch_of(random_trees(2), tokens=tokens)
    rewards = functools.partial(model.rewards, prompts=None, differentiated=True)

    def pullback(params: Any) -> Any:
        return jax.vjp(lambda weights: rewards(weights, {}, batch), params)[1]

    kept = jax.eval_shape(pullback, abstract_params(config))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize(
    ("remat", "dtype"),
    sweep([("dots", "bfloat16"), ("dots", "float32"), ("full", "bfloat16"), ("none", "float32")], few=(0, 2)),
)
def test_a_layer_keeps_what_is_estimated(remat: Any, dtype: str) -> None:
    """The difference of two depths and two lengths, without weights, embeddings and the last layer."""
    deep, thin = (
        kept_by_jax(remat, dtype, layers, 2048) - kept_by_jax(remat, dtype, layers, 1024) for layers in (3, 2)
    )
    estimate = StepMemory(config=WIDE, asked=remat, dtype=dtype).kept(remat) / 3
    assert estimate == pytest.approx((deep - thin) / 1024, rel=0.05)


def test_products_are_recomputed_only_if_their_results_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced program of a device with much and with little memory, and of one that does not report it."""
    trees = random_trees(4)
    batch, extras = batch_of(trees), extras_of(trees)

    def products(limit: float | None, remat: str = "auto") -> float:
        monkeypatch.setattr(memory, "memory_limit", lambda device: limit)
        step, *arrays = build(WIDE, remat=remat)
        return executed_flops(step.gradients.trace(*arrays, batch, extras).jaxpr)

    held = 20 * sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(WIDE)))
    dots, full = products(None, "dots"), products(None, "full")
    assert full > 1.15 * dots
    assert products(None) == products(2 * held + GB) == dots
    assert products(held) == full


def test_an_8b_model_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters beside 16 GB of weights: their results fit into an H200 and an H100, and not into a TPU v5e."""
    config = read_model("qwen3-8b")

    def of(gigabytes: float, **settings: Any) -> StepMemory:
        monkeypatch.setattr(memory, "memory_limit", lambda device: gigabytes * GB)
        found = trained(config, tuning="lora", dtype="bfloat16", **settings).memory
        assert found is not None
        return found

    assert [of(size).tokens(65_536) >= BUSY_TOKENS for size in (141, 80, 32)] == [True, True, True]
    assert [of(size).policy(of(size).tokens(65_536)) for size in (141, 80, 32)] == ["dots", "dots", "full"]
    assert of(141).tokens(65_536) > of(80).tokens(65_536)
    assert of(141).policy(65_536) == "full"
    assert of(32, remat="none").policy(65_536) == "none"
    needed = of(141)
    assert needed.room is not None
    assert needed.room == pytest.approx(0.9 * 141 * GB - 2 * 8.2 * GB, rel=0.02)
    split = replace(needed, shards=16)
    assert split.policy(16 * needed.tokens(65_536)) == needed.policy(needed.tokens(65_536))


def test_on_cpus_the_memory_of_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters beside 15 GB of weights. The length of streams remains that of `dots`; an unknown memory is enough."""
    config, found = read_model("qwen3-8b"), {}
    for gigabytes in (20, 64, np.inf):
        monkeypatch.setattr(memory, "machine_memory", lambda size=gigabytes: size * GB)
        of_machine = trained(config, tuning="lora", dtype="bfloat16").memory
        assert of_machine is not None
        found[gigabytes] = of_machine.policy(4096), of_machine.policy(65_536), of_machine.tokens(4096)
    assert found == {
        20: ("full", "full", 2048),
        64: ("dots", "full", 2048),
        np.inf: ("dots", "dots", 2048),
    }
    asked = trained(config, tuning="lora", dtype="bfloat16", remat="none").memory
    assert asked is not None
    assert asked.policy(65_536) == "none"


def test_a_value_function_of_its_own_keeps_as_much_again() -> None:
    config = replace(WIDE, head=LanguageHead(tied=False, softcap=None))
    kept = []
    for trunk in ("own", "shared"):
        settings = PpoSettings(algorithm="ppo", value=ValueSettings(trunk=trunk))
        actor = Actor(settings, config, make_mesh(devices=jax.devices()[:1]))
        kept.append(actor.memory.kept("dots"))
    assert kept[0] == 2 * kept[1]
    assert jnp.isfinite(kept[0])
