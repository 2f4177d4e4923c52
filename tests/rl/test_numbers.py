"""The numbers of reinforcement learning against formulas in float64, written as loops, and against TRL."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prb_jax.rl import numbers, objective
from prb_jax.rl.objective import POLICY, VALUE, Actor, Targets, rollout_loss, rollout_losses
from prb_jax.rl.sections import KlSettings, PolicyLossSettings, UpdateSettings, ValueSettings
from prb_jax.rl.settings import PpoSettings
from prb_jax.training.weights import make_optimizer

RNG = np.random.default_rng(3)
LENGTHS = np.array([[5, 1, 9], [9, 4, 2]])
COLUMNS = 9
MASK = (np.arange(COLUMNS) < LENGTHS[..., None]).astype(np.float64)
SHAPE = MASK.shape


def normal(scale: float = 1.0) -> np.ndarray:
    """Numbers everywhere, so that a mask that is forgotten shows."""
    return scale * RNG.standard_normal(SHAPE)


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=tolerance, atol=tolerance)


def loops(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """The generalised advantage as its definition says: a sum over all later temporal differences."""
    found = np.zeros(rewards.shape)
    for row in np.ndindex(lengths.shape):
        for t in range(lengths[row]):
            for later in range(t, lengths[row]):
                following = values[row][later + 1] if later + 1 < lengths[row] else 0.0
                delta = rewards[row][later] + gamma * following - values[row][later]
                found[row][t] += (gamma * lam) ** (later - t) * delta
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.5, 0.0)])
def test_advantages_are_the_sums_of_their_definition(gamma: float, lam: float) -> None:
    rewards, values = normal(), normal()
    found = numbers.gae(jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(MASK), gamma=gamma, lam=lam)
    expected = loops(rewards, values, LENGTHS, gamma, lam)
    close(found.advantages, expected)
    close(found.returns, expected + values * MASK)
    returns = numbers.discounted(jnp.asarray(rewards), jnp.asarray(MASK), gamma=gamma)
    close(returns, loops(rewards, np.zeros(SHAPE), LENGTHS, gamma, 1.0))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.37, 0.81), (0.93, 0.0)])
def test_values_beside_the_mask_have_no_influence(gamma: float, lam: float) -> None:
    """Rewards and values of verl's CPU tests, without the tokens in front that are no response."""
    rewards = np.array([0.1, 0.1, 0.1, 0.1, 1.0])
    values = np.array([4.0, 5.0, 6.0, 7.0, 9.0])
    expected = loops(rewards[None], values[None], np.array([5]), gamma, lam)[0]
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


def test_the_mask_of_values_may_be_one_longer_than_that_of_tokens() -> None:
    """Point 10: TRL gives the score to the state after the last token, whose value then counts."""
    mask = (np.arange(COLUMNS + 1) < LENGTHS[..., None] + 1).astype(np.float64)
    values = RNG.standard_normal(mask.shape)
    scores = jnp.asarray(RNG.standard_normal(LENGTHS.shape))
    rewards = numbers.token_rewards(scores, jnp.asarray(LENGTHS), jnp.zeros(mask.shape))
    found = numbers.gae(rewards, jnp.asarray(values), jnp.asarray(mask), gamma=1.0, lam=0.95)
    close(found.advantages, loops(np.asarray(rewards), values, LENGTHS + 1, 1.0, 0.95))
    shorter = numbers.gae(
        rewards[..., :-1], jnp.asarray(values[..., :-1]), jnp.asarray(MASK), gamma=1.0, lam=0.95
    )
    assert not np.allclose(found.advantages[..., :-1] * MASK, shorter.advantages)


def test_rewards_are_whitened_without_shifting_the_mean_and_advantages_with() -> None:
    values = normal() + 2.0
    real = values[MASK > 0]
    spread = np.sqrt(real.var(ddof=1) + 1e-8)
    for shift in (False, True):
        found = np.asarray(numbers.whiten(jnp.asarray(values), jnp.asarray(MASK), shift_mean=shift))
        expected = (values - real.mean()) / spread + (0.0 if shift else real.mean())
        close(found, np.where(MASK > 0, expected, 0.0))
        assert found[MASK > 0].mean() == pytest.approx(0.0 if shift else real.mean(), abs=1e-5)
    single = numbers.whiten(jnp.full((1, 1), 3.0), jnp.ones((1, 1)), shift_mean=True)
    assert np.asarray(single) == 0.0


def test_estimates_of_the_kl() -> None:
    """Point 4. Over all tokens of a small vocabulary the expectations are sums."""
    logits, reference = (
        jnp.asarray(RNG.standard_normal(7)),
        jax.nn.log_softmax(jnp.asarray(RNG.standard_normal(7))),
    )
    p, q = (
        np.exp(np.asarray(jax.nn.log_softmax(logits), np.float64)),
        np.exp(np.asarray(reference, np.float64)),
    )
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

    true = np.asarray(
        jax.grad(lambda x: (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference)).sum())(logits)
    )
    close(as_loss("k1"), np.zeros(7))
    close(as_loss("k2"), true)
    assert not np.allclose(as_loss("k3"), true, atol=1e-2)


def test_a_token_that_the_reference_finds_less_likely_costs_reward() -> None:
    """Point 5: the sign."""
    kl = numbers.kl_estimate(jnp.array([[-1.0, -1.0]]), jnp.array([[-3.0, -0.5]]), "k1")
    found = numbers.token_rewards(jnp.array([2.0]), jnp.array([1]), 0.1 * kl)
    close(found, [[-0.2, 2.0 + 0.05]])


def test_the_clipped_losses_are_their_formulas() -> None:
    new, old, advantages = normal(0.3), normal(0.3), normal()
    ratio = np.exp(new - old)
    per_token = numbers.log_ratio(jnp.asarray(new), jnp.asarray(old), jnp.asarray(MASK), level="token")
    loss, clipped = numbers.clipped_policy_loss(per_token, jnp.asarray(advantages), clip=0.2)
    for place in zip(*np.nonzero(MASK), strict=True):
        r, a = ratio[place], advantages[place]
        assert float(loss[place]) == pytest.approx(-min(r * a, min(max(r, 0.8), 1.2) * a), abs=1e-5)
        assert bool(clipped[place]) == ((r > 1.2 and a > 0) or (r < 0.8 and a < 0))
    whole = numbers.log_ratio(jnp.asarray(new), jnp.asarray(old), jnp.asarray(MASK), level="sequence")
    mean = ((new - old) * MASK).sum(-1, keepdims=True) / LENGTHS[..., None]
    close(whole, np.broadcast_to(mean, SHAPE))
    values, before, returns = normal(), normal(), normal()
    held = before + np.clip(values - before, -0.2, 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2)
    close(numbers.clipped_value_loss(*map(jnp.asarray, (values, before, returns)), clip=0.2), expected)
    free = numbers.clipped_value_loss(*map(jnp.asarray, (values, before, returns)), clip=None)
    close(free, 0.5 * (values - returns) ** 2)


def test_a_loss_in_four_modes_does_not_depend_on_microbatches() -> None:
    """Point 8."""
    losses = normal()
    sums = (losses * MASK).sum(-1)
    expected = {
        "token-mean": sums.sum() / LENGTHS.sum(),
        "sequence-mean-token-mean": (sums / LENGTHS).mean(),
        "sequence-mean-token-sum": sums.mean(),
        "sequence-mean-token-sum-norm": sums.mean() / 12,
    }
    assert set(expected) == set(numbers.AGGREGATIONS)
    for mode, value in expected.items():
        weights = np.asarray(numbers.token_weights(jnp.asarray(MASK), mode, longest=12))
        assert (losses * weights).sum() == pytest.approx(value, abs=1e-6)
        parts = [(losses[row] * weights[row]).sum() for row in range(len(losses))]
        assert sum(parts) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("responses", "prompts", "seed"), [(64, 5, 0), (128, 8, 1), (512, 10, 2)])
def test_advantages_within_groups_of_any_size(responses: int, prompts: int, seed: int) -> None:
    """In the sizes of verl's CPU tests (`tests/trainer/ppo/test_core_algos_on_cpu.py`), which come without results."""
    random = np.random.default_rng(seed)
    for size in 2 + random.multinomial(responses - 2 * prompts, np.full(prompts, 1 / prompts)):
        scores = random.standard_normal((1, size)) * 10
        given, mean = jnp.asarray(scores, jnp.float32), scores.mean()
        deviation = np.sqrt(((scores - mean) ** 2).sum() / (size - 1))
        close(numbers.group_advantages(given, baseline="mean"), scores - mean)
        # verl adds 1e-6 to the deviation, TRL and we 1e-4
        close(
            numbers.group_advantages(given, baseline="mean", scale=True), (scores - mean) / (deviation + 1e-4)
        )
        others = scores - (scores.sum() - scores) / (size - 1)
        close(numbers.group_advantages(given, baseline="others"), others)


def test_groups_of_equal_scores_and_of_scores_that_hardly_differ() -> None:
    for baseline, scale in (("others", False), ("mean", True)):
        equal = numbers.group_advantages(jnp.full((1, 3), 0.3), baseline=baseline, scale=scale)
        assert (np.asarray(equal) == 0).all()
    scores = np.array([[1.0, 1.00001], [2.0, 2.00001]], np.float32)
    exact = scores.astype(np.float64)
    found = numbers.group_advantages(jnp.asarray(scores), baseline="mean", scale=True)
    expected = (exact - exact.mean(1, keepdims=True)) / (exact.std(1, ddof=1, keepdims=True) + 1e-4)
    # a unit in the last place of 2.0 is 2 % of their distance
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_dpo_and_the_explained_variance() -> None:
    chosen, rejected = normal(), normal()
    margin = 0.3 * (chosen - rejected)
    close(numbers.dpo_loss(jnp.asarray(chosen), jnp.asarray(rejected), beta=0.3), np.log1p(np.exp(-margin)))
    smooth = 0.9 * np.log1p(np.exp(-margin)) + 0.1 * np.log1p(np.exp(margin))
    found = numbers.dpo_loss(jnp.asarray(chosen), jnp.asarray(rejected), beta=0.3, label_smoothing=0.1)
    close(found, smooth)
    real = MASK > 0
    expected = 1 - (chosen - rejected)[real].var(ddof=1) / chosen[real].var(ddof=1)
    close(numbers.explained_variance(jnp.asarray(rejected), jnp.asarray(chosen), jnp.asarray(MASK)), expected)


def test_a_rollout_without_an_end_and_a_long_one() -> None:
    """Point 9: TRL subtracts, the N+ code replaces; each has its name."""
    scores, ended = jnp.array([2.0, 3.0]), jnp.array([True, False])
    close(numbers.ended_scores(scores, ended, rule="none", value=1.0), [2.0, 3.0])
    close(numbers.ended_scores(scores, ended, rule="subtract", value=1.0), [2.0, 2.0])
    close(numbers.ended_scores(scores, ended, rule="replace", value=-1.0), [2.0, -1.0])
    close(numbers.long_scores(scores, jnp.array([4, 9]), free=5, penalty=0.1), [2.0, 2.6])


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


def test_the_kl_of_a_token_is_multiplied_by_no_ratio_and_stands_in_the_mean() -> None:
    """Points 5 and 6: with the ratio of the whole response, the gradient of the KL is that of the KL alone."""
    new, old, reference = normal(0.3), normal(0.3), normal(0.3)
    for ratio in numbers.RATIOS:
        settings = PpoSettings(
            kl=KlSettings(place="loss", estimator="k2", coefficient=0.5), loss=PolicyLossSettings(ratio=ratio)
        )
        given = targets(settings, old=old, reference=reference)

        def loss(x: Any, settings: Any = settings, given: Any = given) -> jax.Array:
            found = rollout_losses(x, given, settings)
            return found["policy_loss"] + found["kl_loss"]

        value, gradient = jax.value_and_grad(loss)(jnp.asarray(new))
        close(value, 0.5 * (0.5 * (new - reference) ** 2 * MASK).sum() / MASK.sum())
        close(gradient, 0.5 * (new - reference) * MASK / MASK.sum())


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
        value=ValueSettings(trunk=trunk),
    )
    trunks = []

    def token_states(actor: Any, params: Any, *_: Any, **__: Any) -> Any:
        trunks.append(params["name"])
        return jnp.zeros((1, 1, 1))

    monkeypatch.setattr(objective, "token_states", token_states)
    monkeypatch.setattr(objective, "token_logprobs", lambda *_: (jnp.asarray(new), jnp.asarray(entropy)))
    monkeypatch.setattr(objective, "merge", lambda own, frozen: own)

    arrays = {
        "weights": mask / mask.sum(), "counts": mask / mask.sum(), "old": old, "reference": reference,
        "advantages": advantages, "kl": np.full((2, 3), 0.3), "value_weights": states / states.sum(), "values": before,
        "returns": returns,
    }  # fmt: skip
    targets = Targets(**{name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()})
    unused: Any = None
    reads: Any = types.SimpleNamespace(by_response=lambda _: jnp.asarray(values))
    inputs = {POLICY: {"name": "policy"}, VALUE: {"name": "value", "score": jnp.zeros((1, 1))}}
    total, sums = rollout_loss(Actor(settings, unused, unused), inputs, {}, unused, (reads, targets))
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


def test_epsilon_is_added_to_the_root() -> None:
    """Point 11: optax's place, u / (sqrt(v) + eps), and not sqrt(v + eps)."""
    options = UpdateSettings(learning_rate=0.1, eps=0.5, clip_norm=None, b1=0.0, b2=0.0)
    transformation = make_optimizer(options, lengths=(1,))
    params = {"q": jnp.array([1.0])}
    changes, _ = transformation.update({"q": jnp.array([0.3])}, transformation.init(params), params)
    new: Any = optax.apply_updates(params, changes)
    close(new["q"], [1.0 - 0.1 * 0.3 / (0.3 + 0.5)])


TRL_MODES: dict[str, Any] = {
    "grpo": "sequence-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "sequence-mean-token-sum-norm",
    "dapo": "token-mean",
}


@pytest.mark.parametrize("mode", TRL_MODES)
@pytest.mark.parametrize("ratio", numbers.RATIOS)
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
    advantages = numbers.group_advantages(jnp.asarray(scores, jnp.float32), baseline="mean", scale=True)
    given = targets(
        settings, old=old, reference=reference, advantages=np.asarray(advantages)[..., None] * MASK
    )

    def loss(x: Any) -> jax.Array:
        found = rollout_losses(x, given, settings)
        return found["policy_loss"] + found["kl_loss"]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(new, jnp.float32))

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
        max_completion_length=COLUMNS, _entropy_bonus_enabled=False, _metrics=_Anything(), _logs=_Anything(),
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


class _Anything(dict):
    """Takes whatever is reported."""

    def __missing__(self, key: Any) -> _Anything:
        return self

    def append(self, value: Any) -> None:
        """Drop it."""
