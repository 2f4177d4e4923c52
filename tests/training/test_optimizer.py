"""The optimiser against torch's AdamW; schedules by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.lora import init_lora
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.model import bind
from prb_jax.training.config import OptimizerSettings
from prb_jax.training.weights import decay_mask, learning_rate, make_optimizer
from tests.training.small_batches import WINDOWED, small_config


def rates(*lengths: int, **options: Any) -> list[float]:
    rate = learning_rate(OptimizerSettings(learning_rate=1.0, **options), lengths=lengths)
    return [round(float(rate(step)), 6) for step in range(lengths[-1] + 1)]


def test_schedules_by_hand() -> None:
    assert rates(4, schedule="constant") == [1, 1, 1, 1, 1]
    assert rates(4, schedule="linear", final_share=0.0) == [1, 0.75, 0.5, 0.25, 0]
    assert rates(4, schedule="cosine", final_share=0.2) == [1.0, 0.882843, 0.6, 0.317157, 0.2]
    assert rates(5, schedule="wsd", decay_share=0.4, final_share=0.5) == [1, 1, 1, 1, 0.75, 0.5]
    # A fall that is longer than what is left starts after the warm-up.
    late = rates(6, schedule="wsd", warmup_share=4 / 6, decay_share=0.9, final_share=0.0)
    assert late == [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]


EVERY_SCHEDULE = pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])


@EVERY_SCHEDULE
def test_the_rate_rises_to_the_peak_never_starts_at_nothing_and_stays_where_it_ends(schedule: str) -> None:
    given = {"schedule": schedule, "warmup_share": 0.2, "final_share": 0.1}
    course = rates(20, **given)
    assert course[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert max(course) == 1.0
    assert course[-1] == (1.0 if schedule == "constant" else 0.1)
    rate = learning_rate(OptimizerSettings(learning_rate=1.0, **given), lengths=(20,))
    assert float(rate(20)) == float(rate(500))


@EVERY_SCHEDULE
def test_a_lengthened_run_keeps_its_first_part_and_goes_on_as_the_longer_one(schedule: str) -> None:
    options = {"schedule": schedule, "final_share": 0.1}
    first, both = rates(20, warmup_share=0.2, **options), rates(20, 40, warmup_share=0.2, **options)
    assert both[:20] == first[:20]
    # The warm-up is not repeated: that of the first length is a tenth of the second.
    assert both[20:] == rates(40, warmup_share=0.1, **options)[20:]
    assert rates(20, 40, 60, warmup_share=0.2, **options)[:40] == both[:40]


@pytest.mark.parametrize(("decay", "clip", "eps"), [(0.0, None, 0.5), (0.1, 0.5, 1e-6), (0.1, 100.0, 1e-6)])
def test_updates_equal_those_of_torch(decay: float, clip: float | None, eps: float) -> None:
    """Epsilon, which may be large, is added to the root of the second moment."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start = {"score": rng.normal(size=(6, 3)), "final_norm": rng.normal(size=(4,))}
    rate: dict[str, Any] = {"learning_rate": 0.03, "b1": 0.8, "b2": 0.9, "eps": eps, "schedule": "constant"}
    options = OptimizerSettings(weight_decay=decay, clip_norm=clip, warmup_share=0.0, **rate)
    transformation = make_optimizer(options, lengths=(6,))
    params = jax.tree.map(jnp.float32, start)
    state = transformation.init(params)
    theirs = {name: torch.tensor(x, dtype=torch.float32, requires_grad=True) for name, x in start.items()}
    groups = [
        {"params": [theirs["score"]], "weight_decay": decay},
        {"params": [theirs["final_norm"]], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.9), eps=eps)
    for _ in range(6):
        gradient = {name: rng.normal(size=x.shape) for name, x in start.items()}
        updates, state = transformation.update(jax.tree.map(jnp.float32, gradient), state, params)
        params = optax.apply_updates(params, updates)
        for name, tensor in theirs.items():
            tensor.grad = torch.tensor(gradient[name], dtype=torch.float32)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip)
        adam.step()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(params[name], tensor.detach().numpy(), atol=2e-5, rtol=0)


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    config = small_config(**WINDOWED, attention_bias=True)
    params = abstract_params(config)
    params["layers"] |= init_lora(bind(config, params).layers, LoraConfig(rank=2))["layers"]
    mask = decay_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    decays = {name for name, value in mask["layers"].items() if value}
    matrices = {"q", "k", "v", "o", "gate", "up", "down"}
    assert decays == matrices | {f"{name}_lora_{part}" for name in matrices for part in "ab"}
    assert (mask["embed"], mask["score"], mask["final_norm"]) == (True, True, False)
