"""The optimiser against torch's AdamW; schedules by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prb_jax.checkpoints.load import abstract_params
from prb_jax.errors import PrbError
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.lora import LoraConfig, init_lora
from prb_jax.training.config import OptimizerSettings
from prb_jax.training.weights import decay_mask, learning_rate, make_optimizer


def rates(**options) -> list[float]:
    lengths = options.pop("lengths", None) or (options.pop("steps"),)
    rate = learning_rate(OptimizerSettings(learning_rate=1.0, **options), lengths=lengths)
    return [round(float(rate(step)), 6) for step in range(lengths[-1] + 1)]


def test_schedules_by_hand() -> None:
    assert rates(steps=4, schedule="constant") == [1, 1, 1, 1, 1]
    assert rates(steps=4, schedule="linear", final_share=0.0) == [1, 0.75, 0.5, 0.25, 0]
    assert rates(steps=4, schedule="cosine", final_share=0.2) == [
        1.0, 0.882843, 0.6, 0.317157, 0.2,
    ]  # fmt: skip
    assert rates(steps=5, schedule="wsd", decay_share=0.4, final_share=0.5) == [1, 1, 1, 1, 0.75, 0.5]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_to_the_peak_and_never_starts_at_nothing(schedule: str) -> None:
    found = rates(steps=20, schedule=schedule, warmup_share=0.2, final_share=0.1)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert max(found) == 1.0
    assert found[-1] == (1.0 if schedule == "constant" else 0.1)


def test_a_fall_longer_than_what_is_left_starts_after_the_warm_up() -> None:
    found = rates(steps=6, schedule="wsd", warmup_share=4 / 6, decay_share=0.9, final_share=0.0)
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_the_rate_does_not_change_past_the_end(schedule: str) -> None:
    rate = learning_rate(OptimizerSettings(learning_rate=1.0, schedule=schedule), lengths=(10,))
    assert float(rate(10)) == float(rate(500))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_lengthened_run_keeps_its_first_part_and_goes_on_as_the_longer_one(schedule: str) -> None:
    options = {"schedule": schedule, "final_share": 0.1}
    first, both = (rates(lengths=x, warmup_share=0.2, **options) for x in ((20,), (20, 40)))
    assert both[:20] == first[:20]
    # The warm-up is not repeated: that of the first length is a tenth of the second.
    assert both[20:] == rates(lengths=(40,), warmup_share=0.1, **options)[20:]
    assert rates(lengths=(20, 40, 60), warmup_share=0.2, **options)[:40] == both[:40]


@pytest.mark.parametrize(("decay", "clip"), [(0.0, None), (0.1, 0.5), (0.1, 100.0)])
def test_updates_equal_those_of_torch(decay: float, clip: float | None) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start = {"score": rng.normal(size=(6, 3)), "final_norm": rng.normal(size=(4,))}
    gradients = [{name: rng.normal(size=x.shape) for name, x in start.items()} for _ in range(6)]

    config = OptimizerSettings(
        learning_rate=0.03, schedule="constant", b1=0.8, b2=0.9, eps=1e-6,
        weight_decay=decay, clip_norm=clip,
    )  # fmt: skip
    transformation = make_optimizer(config, lengths=(6,))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
    state = transformation.init(params)
    theirs = {name: torch.tensor(x, dtype=torch.float32, requires_grad=True) for name, x in start.items()}
    adam = torch.optim.AdamW(
        [
            {"params": [theirs["score"]], "weight_decay": decay},
            {"params": [theirs["final_norm"]], "weight_decay": 0.0},
        ],
        lr=0.03, betas=(0.8, 0.9), eps=1e-6,
    )  # fmt: skip
    for gradient in gradients:
        updates, state = transformation.update(
            jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient), state, params
        )
        params = optax.apply_updates(params, updates)
        for name, tensor in theirs.items():
            tensor.grad = torch.tensor(gradient[name], dtype=torch.float32)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip)
        adam.step()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(params[name], tensor.detach().numpy(), atol=2e-5, rtol=0)


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    raw = {
        "architectures": ["Gemma2ForSequenceClassification"], "model_type": "gemma2", "vocab_size": 64,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "num_labels": 1, "pad_token_id": 0, "sliding_window": 16,
        "query_pre_attn_scalar": 8, "attention_bias": True,
    }  # fmt: skip
    params = abstract_params(parse_config(raw, where="test"))
    params["layers"] |= init_lora(params, LoraConfig(rank=2))["layers"]
    mask = decay_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    decays = {name for name, value in mask["layers"].items() if value}
    matrices = {"q", "k", "v", "o", "gate", "up", "down"}
    assert decays == matrices | {f"{name}_lora_{part}" for name in matrices for part in "ab"}
    assert (mask["embed"], mask["score"], mask["final_norm"]) == (True, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, r"optimizer\.learning_rate: expected more than 0, or None, found 0\.0"),
        (
            {"schedule": "step"},
            r"optimizer\.schedule: expected one of constant, linear, cosine, wsd, found 'step'",
        ),
        ({"warmup_share": 1.1}, r"optimizer\.warmup_share: expected 0 to 1, found 1\.1"),
        ({"clip_norm": 0.0}, r"optimizer\.clip_norm: expected more than 0, or None, found 0\.0"),
        ({"b2": 1.0}, r"optimizer\.b2: expected at least 0 and less than 1, found 1\.0"),
        ({"decay_share": 1.5}, r"optimizer\.decay_share: expected 0 to 1, found 1\.5"),
    ],
)
def test_options_that_cannot_be(options: dict, message: str) -> None:
    with pytest.raises(PrbError, match=message):
        OptimizerSettings(**options)
