"""The numbers of reinforcement learning against formulas in float64, written as loops, and against TRL."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, get_args
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.behaviour.rl import numbers, objective
from prb_jax.behaviour.rl.objective import POLICY, VALUE, Actor, Targets, rollout_loss, rollout_losses
from prb_jax.behaviour.rl.sections import KlSettings, PolicyLossSettings, ValueSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from tests.behaviour.rl.tiny import gae_by_definition

RNG = np.random.default_rng(3)
LENGTHS = np.array([[5, 1, 9], [9, 4, 2]])
COLUMNS = 9
MASK = (np.arange(COLUMNS) < LENGTHS[..., None]).astype(np.float64)
SHAPE = MASK.shape


def normal(scale: float = 1.0) -> np.ndarray:
    """Numbers everywhere, so that a mask that is forgotten shows."""
    return scale * RNG.standard_normal(SHAPE)


def ours(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """What a function gives for arrays of numpy."""
    return function(*map(jnp.asarray, arrays), **options)


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.37, 0.81), (1.0, 1.0), (0.5, 0.0)])
def test_advantages_are_the_sums_of_their_definition(gamma: float, lam: float) -> None:
    rewards, values = normal(), normal()
    estimate = ours(numbers.gae, rewards, values, MASK, gamma=gamma, lam=lam)
    expected = gae_by_definition(rewards, values, LENGTHS, gamma, lam)
    close(estimate.advantages, expected)
    close(estimate.returns, expected + values * MASK)
    returns = ours(numbers.discounted, rewards, MASK, gamma=gamma)
    close(returns, gae_by_definition(rewards, np.zeros(SHAPE), LENGTHS, gamma, 1.0))


def test_estimates_of_the_kl() -> None:
    """Point 4. Over all tokens of a small vocabulary the expectations are sums."""
    logits, reference = (jax.nn.log_softmax(RNG.standard_normal(7)) for _ in range(2))
    p, q = (np.exp(np.asarray(x, np.float64)) for x in (logits, reference))
    kl = (p * np.log(p / q)).sum()

    def estimates(x: Any, kind: str) -> jax.Array:
        return numbers.kl_estimate(jax.nn.log_softmax(x), reference, kind)

    drawn = jnp.asarray(p)
    close((drawn * estimates(logits, "k1")).sum(), kl)
    close((drawn * estimates(logits, "k3")).sum(), kl)
    close(estimates(logits, "k2"), 0.5 * np.log(p / q) ** 2)
    close(estimates(logits, "k3"), q / p - 1 - np.log(q / p))
    assert (np.asarray(estimates(logits, "k3")) >= 0).all()
    tiny = numbers.kl_estimate(jnp.float32(-2.0), jnp.float32(-2.0 + 1e-4), "k3")
    assert 0 < float(tiny) < 1e-7

    def as_loss(kind: str) -> np.ndarray:
        return np.asarray(jax.grad(lambda x: (drawn * estimates(x, kind)).sum())(logits))

    true = jax.grad(lambda x: (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference)).sum())(logits)
    close(as_loss("k1"), np.zeros(7))
    close(as_loss("k2"), true)
    assert not np.allclose(as_loss("k3"), true, atol=1e-2)


def test_the_clipped_losses_are_their_formulas() -> None:
    new, old, advantages = normal(0.3), normal(0.3), normal()
    ratio = np.exp(new - old)
    per_token = ours(numbers.log_ratio, new, old, MASK, level="token")
    loss, clipped = ours(numbers.clipped_policy_loss, per_token, advantages, clip=0.2)
    for place in zip(*np.nonzero(MASK), strict=True):
        r, a = ratio[place], advantages[place]
        assert float(loss[place]) == pytest.approx(-min(r * a, min(max(r, 0.8), 1.2) * a), abs=1e-5)
        assert bool(clipped[place]) == ((r > 1.2 and a > 0) or (r < 0.8 and a < 0))
    whole = ours(numbers.log_ratio, new, old, MASK, level="sequence")
    mean = ((new - old) * MASK).sum(-1, keepdims=True) / LENGTHS[..., None]
    close(whole, np.broadcast_to(mean, SHAPE))
    values, before, returns = normal(), normal(), normal()
    held = before + np.clip(values - before, -0.2, 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2)
    close(ours(numbers.clipped_value_loss, values, before, returns, clip=0.2), expected)
    free = ours(numbers.clipped_value_loss, values, before, returns, clip=None)
    close(free, 0.5 * (values - returns) ** 2)


def test_a_loss_in_four_modes_is_a_sum_with_weights_of_the_whole_minibatch() -> None:
    """Point 8: so that it does not depend on microbatches."""
    losses = normal()
    sums = (losses * MASK).sum(-1)
    expected = {
        "token-mean": sums.sum() / LENGTHS.sum(),
        "sequence-mean-token-mean": (sums / LENGTHS).mean(),
        "sequence-mean-token-sum": sums.mean(),
        "sequence-mean-token-sum-norm": sums.mean() / 12,
    }
    assert set(expected) == set(get_args(numbers.Aggregation))
    for mode, value in expected.items():
        weights = np.asarray(ours(numbers.token_weights, MASK, mode=mode, longest=12))
        assert (losses * weights).sum() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("responses", "prompts", "seed"), [(64, 5, 0), (128, 8, 1), (512, 10, 2)])
def test_advantages_within_groups_of_any_size(responses: int, prompts: int, seed: int) -> None:
    """In the sizes of verl's CPU tests (`tests/trainer/ppo/test_core_algos_on_cpu.py`), which come without results."""
    random = np.random.default_rng(seed)
    for size in 2 + random.multinomial(responses - 2 * prompts, np.full(prompts, 1 / prompts)):
        scores = random.standard_normal((1, size)) * 10
        centred = scores - scores.mean()
        deviation = np.sqrt((centred**2).sum() / (size - 1))
        close(ours(numbers.group_advantages, scores, baseline="mean"), centred)
        # verl adds 1e-6 to the deviation, TRL and we 1e-4
        scaled = ours(numbers.group_advantages, scores, baseline="mean", scale=True)
        close(scaled, centred / (deviation + 1e-4))
        others = scores - (scores.sum() - scores) / (size - 1)
        close(ours(numbers.group_advantages, scores, baseline="others"), others)


def test_numbers_that_are_equal_or_hardly_differ() -> None:
    assert ours(numbers.whiten, [[3.0]], [[1.0]], shift_mean=True) == 0.0
    for baseline, scale in (("others", False), ("mean", True)):
        equal = ours(numbers.group_advantages, np.full((1, 3), 0.3), baseline=baseline, scale=scale)
        assert (np.asarray(equal) == 0).all()
    scores = np.array([[1.0, 1.00001], [2.0, 2.00001]], np.float32)
    exact = scores.astype(np.float64)
    scaled = ours(numbers.group_advantages, scores, baseline="mean", scale=True)
    expected = (exact - exact.mean(1, keepdims=True)) / (exact.std(1, ddof=1, keepdims=True) + 1e-4)
    # a unit in the last place of 2.0 is 2 % of their distance
    np.testing.assert_allclose(scaled, expected, rtol=0.02)


def test_the_loss_of_dpo() -> None:
    chosen, rejected = normal(), normal()
    margin = 0.3 * (chosen - rejected)
    close(ours(numbers.dpo_loss, chosen, rejected, beta=0.3), np.log1p(np.exp(-margin)))
    smooth = 0.9 * np.log1p(np.exp(-margin)) + 0.1 * np.log1p(np.exp(margin))
    close(ours(numbers.dpo_loss, chosen, rejected, beta=0.3, label_smoothing=0.1), smooth)


def test_a_rollout_without_an_end_and_a_long_one() -> None:
    """Point 9: TRL subtracts, the N+ code replaces; each has its name."""
    scores, ended = np.array([2.0, 3.0]), np.array([True, False])
    for rule, value, expected in (("none", 1.0, 3.0), ("subtract", 1.0, 2.0), ("replace", -1.0, -1.0)):
        close(ours(numbers.ended_scores, scores, ended, rule=rule, value=value), [2.0, expected])
    close(ours(numbers.long_scores, scores, [4, 9], free=5, penalty=0.1), [2.0, 2.6])


def test_the_adapted_coefficient_grows_by_at_most_a_fifth() -> None:
    def after(kl: float) -> float:
        return numbers.adapted_coefficient(0.1, kl=kl, target=6.0, horizon=100, samples=50)

    assert after(6.6) == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert after(60.0) == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert after(-3.0) == pytest.approx(0.1 * (1 - 0.2 * 0.5))


def targets(settings: PpoSettings, **changes: Any) -> Targets:
    weights = numbers.token_weights(jnp.asarray(MASK), settings.loss.aggregation, longest=COLUMNS)
    zero, longer = np.zeros(SHAPE), np.zeros((*SHAPE[:2], COLUMNS + 1))
    made = {
        "weights": weights, "counts": MASK / MASK.sum(), "old": zero, "reference": zero, "advantages": zero,
        "kl": np.full(SHAPE[:2], settings.kl.coefficient), "value_weights": longer, "values": longer, "returns": longer,
    }  # fmt: skip
    return Targets(**{name: jnp.asarray(value, jnp.float32) for name, value in {**made, **changes}.items()})


def value_and_gradient(new: np.ndarray, given: Targets, settings: PpoSettings) -> Any:
    """Of the losses of policy and KL, by the log-probabilities of now."""

    def loss(logprobs: jax.Array) -> jax.Array:
        losses = rollout_losses(logprobs, given, settings)
        return losses["policy_loss"] + losses["kl_loss"]

    return jax.value_and_grad(loss)(jnp.asarray(new, jnp.float32))


def test_the_kl_of_a_token_is_multiplied_by_no_ratio_and_stands_in_the_mean() -> None:
    """Points 5 and 6: with the ratio of the whole response, the gradient of the KL is that of the KL alone."""
    new, old, reference = normal(0.3), normal(0.3), normal(0.3)
    for ratio in get_args(numbers.Ratio):
        settings = PpoSettings(
            kl=KlSettings(place="loss", estimator="k2", coefficient=0.5), loss=PolicyLossSettings(ratio=ratio)
        )
        given = targets(settings, old=old, reference=reference)

        value, gradient = value_and_gradient(new, given, settings)
        close(value, 0.5 * (0.5 * (new - reference) ** 2 * MASK).sum() / MASK.sum())
        close(gradient, 0.5 * (new - reference) * MASK / MASK.sum())


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_the_whole_loss_of_ppo(monkeypatch: pytest.MonkeyPatch, trunk: Any) -> None:
    """Policy, KL, entropy and value, each with its weight and its coefficient, from the same numbers."""
    mask, states = MASK > 0, np.arange(COLUMNS + 1) < LENGTHS[..., None]
    new, old, reference, advantages, entropy = (normal() for _ in range(5))
    values, before, returns = (RNG.standard_normal(states.shape) for _ in range(3))
    settings = PpoSettings(
        kl=KlSettings(place="loss", estimator="k3", coefficient=0.3),
        loss=PolicyLossSettings(entropy_coefficient=0.7, value_coefficient=0.2, value_clip=0.5),
        value=ValueSettings(trunk=trunk),
    )
    trunks = []

    def token_states(actor: Any, params: Any, *_: Any, **__: Any) -> Any:
        trunks.append(params["name"])
        return jnp.zeros((1, 1, 1))

    monkeypatch.setattr(objective, "token_states", token_states)
    monkeypatch.setattr(objective, "token_logprobs", lambda *_: (jnp.asarray(new), jnp.asarray(entropy)))
    monkeypatch.setattr(objective, "merge", lambda trainable, frozen: trainable)

    of_values = {"value_weights": states / states.sum(), "values": before, "returns": returns}
    given = targets(settings, old=old, reference=reference, advantages=advantages, **of_values)
    unused: Any = None
    reads: Any = types.SimpleNamespace(by_response=lambda _: jnp.asarray(values))
    inputs = {POLICY: {"name": "policy"}, VALUE: {"name": "value", "score": jnp.zeros((1, 1))}}
    total, sums = rollout_loss(Actor(settings, unused, unused), inputs, {}, unused, (reads, given))
    assert trunks == (["policy", "value"] if trunk == "own" else ["policy"])

    ratio = np.exp(new - old)
    policy = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)[mask].mean()
    difference = reference - new
    kl = 0.3 * (np.exp(difference) - 1 - difference)[mask].mean()
    held = before + np.clip(values - before, -0.5, 0.5)
    value = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2)[states].mean()
    expected = {"policy_loss": policy, "kl_loss": kl, "value_loss": value}
    expected |= {"entropy": entropy[mask].mean(), "old_kl": (old - new)[mask].mean()}
    for name, number in expected.items():
        assert float(sums.values[name]) == pytest.approx(number, abs=1e-5), name
    assert float(total) == pytest.approx(policy + kl - 0.7 * entropy[mask].mean() + 0.2 * value, abs=1e-5)


TRL_MODES: dict[str, Any] = {
    "grpo": "sequence-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "sequence-mean-token-sum-norm",
    "dapo": "token-mean",
}


@pytest.mark.parametrize("mode", TRL_MODES)
@pytest.mark.parametrize("ratio", get_args(numbers.Ratio))
def test_one_step_is_that_of_trl(mode: str, ratio: Any) -> None:
    """The loss and its gradient by the log-probabilities, from the same numbers, as TRL's own method computes them."""
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    new, old, reference = normal(0.3), normal(0.3), normal(0.3)
    scores = RNG.standard_normal(LENGTHS.shape)
    settings = PpoSettings(
        algorithm="grpo",
        kl=KlSettings(place="loss", estimator="k3", coefficient=0.2),
        loss=PolicyLossSettings(aggregation=TRL_MODES[mode], ratio=ratio),
    )
    advantages = ours(numbers.group_advantages, scores, baseline="mean", scale=True)
    advantages = np.asarray(advantages)[..., None] * MASK
    given = targets(settings, old=old, reference=reference, advantages=advantages)
    value, gradient = value_and_gradient(new, given, settings)
    rows = SHAPE[0] * SHAPE[1]

    def flat(x: Any) -> Any:
        return torch.tensor(np.asarray(x, np.float32).reshape(rows, COLUMNS))

    theirs = flat(new).requires_grad_()
    mask = flat(MASK).int()
    grouped = torch.tensor(scores, dtype=torch.float32)
    trl_advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    fake = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (theirs, torch.zeros_like(theirs), None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=ratio, beta=0.2,
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        epsilon_low=0.2, epsilon_high=0.2, loss_type=mode, use_vllm=False, aux_loss_enabled=False,
        model=types.SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=COLUMNS, _entropy_bonus_enabled=False, _metrics=MagicMock(), _logs=MagicMock(),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction=None: x, gather_for_metrics=lambda x: x
        ),
    )  # fmt: skip
    inputs = {
        "prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask,
        "advantages": trl_advantages.reshape(-1), "old_per_token_logps": flat(old),
        "ref_per_token_logps": flat(reference), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    expected = trainer.GRPOTrainer._compute_loss(fake, None, inputs)
    expected.backward()
    assert float(value) == pytest.approx(float(expected.detach()), abs=1e-5)
    close(gradient, theirs.grad.numpy().reshape(SHAPE), 1e-6)
