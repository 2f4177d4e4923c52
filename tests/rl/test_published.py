"""Advantages on the inputs that verl publishes for its CPU tests (`tests/trainer/ppo/test_core_algos_on_cpu.py`).

They come without results: expected are the published equations in float64, a loop over the responses each. And the loss
of PPO as a whole, with its value function and its entropy.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.rl import numbers, objective
from prb_jax.rl.forward import Actor
from prb_jax.rl.objective import POLICY, VALUE, Targets, rollout_loss
from prb_jax.rl.sections import KlSettings, PolicyLossSettings
from prb_jax.rl.settings import PpoSettings

SIZES = [(64, 128, 5, 0), (128, 256, 8, 1), (512, 512, 10, 2)]
"""Responses, tokens, prompts and seed."""


@pytest.mark.parametrize(("responses", "tokens", "prompts", "seed"), SIZES)
def test_groups_of_the_published_sizes(responses: int, tokens: int, prompts: int, seed: int) -> None:
    """Prompts with different numbers of responses, tokens that are masked here and there, a reward for each token."""
    random = np.random.default_rng(seed)
    owner = np.concatenate(
        [np.repeat(np.arange(prompts), 2), random.integers(0, prompts, responses - 2 * prompts)]
    )
    mask = random.integers(0, 2, (responses, tokens))
    mask[mask.sum(1) == 0, -1] = 1
    totals = (random.standard_normal((responses, tokens)).astype(np.float32) * mask).sum(1)
    for prompt in range(prompts):
        own = totals[owner == prompt].astype(np.float64)
        given = jnp.asarray(own, jnp.float32)[None]
        rloo, grpo, plain = (
            np.asarray(numbers.group_advantages(given, baseline=baseline, scale=scale))[0]
            for baseline, scale in (("others", False), ("mean", True), ("mean", False))
        )
        deviation = np.sqrt(((own - own.mean()) ** 2).sum() / (len(own) - 1))
        for place, score in enumerate(own):
            others = np.delete(own, place)
            assert rloo[place] == pytest.approx(score - others.mean(), rel=1e-5, abs=1e-5)
            assert plain[place] == pytest.approx(score - own.mean(), rel=1e-5, abs=1e-5)
            # verl adds 1e-6 to the deviation, TRL and we 1e-4: 1e-5 of deviations as large as these
            assert grpo[place] == pytest.approx((score - own.mean()) / (deviation + 1e-4), rel=1e-5, abs=1e-5)
            assert grpo[place] == pytest.approx((score - own.mean()) / (deviation + 1e-6), rel=1e-4, abs=1e-5)


def test_scores_that_hardly_differ() -> None:
    scores = np.array([[1.0, 1.00001], [2.0, 2.00001]], np.float32)
    exact = scores.astype(np.float64)
    found = numbers.group_advantages(jnp.asarray(scores), baseline="mean", scale=True)
    expected = (exact - exact.mean(1, keepdims=True)) / (exact.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(
        found, expected, rtol=0.02
    )  # a unit in the last place of 2.0 is 2 % of their distance


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.37, 0.81), (0.93, 0.0)])
def test_values_beside_the_mask_have_no_influence(gamma: float, lam: float) -> None:
    """The published rewards and values; tokens that are no response are left out in front, which verl skips over."""
    rewards = np.array([0.1, 0.1, 0.1, 0.1, 1.0])
    values = np.array([4.0, 5.0, 6.0, 7.0, 9.0])
    expected, later = np.zeros(5), 0.0
    for t in reversed(range(5)):
        following = values[t + 1] if t < 4 else 0.0
        later = rewards[t] + gamma * following - values[t] + gamma * lam * later
        expected[t] = later
    found = []
    for beside in (0.0, 93.0):
        wide = [np.append(x, [beside, -beside]) for x in (rewards, values)]
        mask = np.array([1.0] * 5 + [0.0] * 2)
        found.append(numbers.gae(*map(jnp.asarray, wide), jnp.asarray(mask), gamma=gamma, lam=lam))  # pyright: ignore
    np.testing.assert_array_equal(found[0].advantages, found[1].advantages)
    np.testing.assert_array_equal(found[0].returns, found[1].returns)
    np.testing.assert_allclose(found[0].advantages[:5], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[0].returns[:5], expected + values, rtol=1e-5, atol=1e-5)
    assert not np.asarray(found[0].advantages[5:]).any()


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_the_whole_loss_of_ppo(monkeypatch: pytest.MonkeyPatch, trunk: Any) -> None:
    """Policy, KL, entropy and value, each with its weight and its coefficient, from the same numbers."""
    random = np.random.default_rng(7)
    shape, longer = (2, 3, 4), (2, 3, 5)
    lengths = np.array([[4, 1, 2], [3, 4, 4]])
    mask, states = np.arange(4) < lengths[..., None], np.arange(5) < lengths[..., None]
    new, old, reference, advantages, entropy = (random.standard_normal(shape) for _ in range(5))
    values, before, returns = (random.standard_normal(longer) for _ in range(3))
    settings = PpoSettings(
        kl=KlSettings(place="loss", estimator="k3", coefficient=0.3),
        loss=PolicyLossSettings(entropy_coefficient=0.7, value_coefficient=0.2, value_clip=0.5),
    )
    trunks = []

    def token_states(actor: Any, params: Any, batch: Any) -> Any:
        trunks.append(params)
        return jnp.zeros((*longer, 1))

    monkeypatch.setattr(objective, "token_states", token_states)
    monkeypatch.setattr(objective, "token_logprobs", lambda *_: (jnp.asarray(new), jnp.asarray(entropy)))
    monkeypatch.setattr(objective, "token_values", lambda *_: jnp.asarray(values))
    monkeypatch.setattr(objective, "merge", lambda own, frozen: own)

    class Batch:
        responses = np.zeros(shape, np.int32)

    arrays = {
        "weights": mask / mask.sum(), "counts": mask / mask.sum(), "old": old, "reference": reference,
        "advantages": advantages, "kl": np.full(2, 0.3), "value_weights": states / states.sum(), "values": before,
        "returns": returns,
    }  # fmt: skip
    targets = Targets(**{name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()})
    chosen: Any = PpoSettings(kl=settings.kl, loss=settings.loss, value=type(settings.value)(trunk=trunk))
    actor: Any = object.__new__(Actor)
    batch: Any = Batch()
    inputs = {POLICY: "policy", VALUE: "value"}
    total, sums = rollout_loss(actor, chosen, inputs, {}, batch, targets)
    assert trunks == (["policy", "value"] if trunk == "own" else ["policy"])

    ratio = np.exp(new - old)
    policy = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)[mask].mean()
    difference = reference - new
    kl = 0.3 * (np.exp(difference) - 1 - difference)[mask].mean()
    held = before + np.clip(values - before, -0.5, 0.5)
    value = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2)[states].mean()
    found = {name: float(number) for name, number in sums.values.items()}
    assert found["policy_loss"] == pytest.approx(policy, abs=1e-5)
    assert found["kl_loss"] == pytest.approx(kl, abs=1e-5)
    assert found["value_loss"] == pytest.approx(value, abs=1e-5)
    assert found["entropy"] == pytest.approx(entropy[mask].mean(), abs=1e-5)
    assert found["old_kl"] == pytest.approx((old - new)[mask].mean(), abs=1e-5)
    assert float(total) == pytest.approx(policy + kl - 0.7 * entropy[mask].mean() + 0.2 * value, abs=1e-5)
