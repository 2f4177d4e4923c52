"""Losses against formulas written out in numpy; test_trl compares values and gradients with those of TRL."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.metrics.accuracy import margin as winning_margin
from prb_jax.training.config import LossSettings
from prb_jax.training.losses import LossParts, comparison_loss


def run(rewards, *, labels=None, mask=None, margin=None, weights=None, **config) -> LossParts:
    rewards = jnp.asarray(rewards, jnp.float32)
    rows, responses = rewards.shape
    return comparison_loss(
        rewards,
        labels=jnp.tile(jnp.arange(responses, 0.0, -1.0), (rows, 1))
        if labels is None
        else jnp.float32(labels),
        mask=jnp.ones((rows, responses), bool) if mask is None else jnp.asarray(mask),
        margin=jnp.zeros(rows) if margin is None else jnp.float32(margin),
        weights=jnp.ones(rows) if weights is None else jnp.float32(weights),
        config=LossSettings(**config),
    )


def loss(*args, **options) -> float:
    return float(run(*args, **options).means()["loss"])


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def sample(rows: int, responses: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, responses)).astype(np.float32) * 2


@pytest.mark.parametrize("kind", ["bradley_terry", "plackett_luce"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("center", [None, 0.01])
def test_pairs_follow_the_formula_whichever_response_comes_first(
    kind: str, smoothing: float, center: float | None
) -> None:
    rewards, margin = sample(7, 2), np.abs(sample(7, 1, seed=1)[:, 0])
    options = {"kind": kind, "label_smoothing": smoothing, "center_rewards_coefficient": center}
    expected = []
    for (chosen, rejected), m in zip(rewards.astype(float), margin.astype(float), strict=True):
        x = chosen - rejected - m
        smoothed = (1 - smoothing) * softplus(-x) + smoothing * softplus(x)
        expected.append(smoothed + (center or 0.0) * (chosen + rejected) ** 2)
    ours = loss(rewards, margin=margin, **options)
    assert ours == pytest.approx(np.mean(expected), rel=1e-6)
    assert ours == loss(rewards[:, ::-1], labels=np.tile([0.0, 1.0], (7, 1)), margin=margin, **options)


def test_the_margin_can_be_left_out() -> None:
    rewards = sample(5, 2)
    assert loss(rewards, margin=np.ones(5), use_margin=False) == loss(rewards)
    assert loss(rewards, margin=np.ones(5)) > loss(rewards)


def test_many_responses_are_all_ordered_pairs() -> None:
    rewards = sample(4, 5)
    labels = np.array([[5, 4, 3, 2, 1], [1, 0, 0, 0, 0], [2, 2, 1, 1, 0], [0, 3, 1, 1, 2]], np.float32)
    expected, centered = [], []
    for row, label in zip(rewards.astype(float), labels, strict=True):
        pairs = [(i, j) for i, j in itertools.permutations(range(5), 2) if label[i] > label[j]]
        expected.append(np.mean([softplus(row[j] - row[i]) for i, j in pairs]))
        centered.append(np.mean([(row[i] + row[j]) ** 2 for i, j in pairs]))
    assert loss(rewards, labels=labels) == pytest.approx(np.mean(expected), rel=1e-6)
    assert loss(rewards, labels=labels, center_rewards_coefficient=0.5) == pytest.approx(
        np.mean(expected) + 0.5 * np.mean(centered), rel=1e-6
    )


def test_plackett_luce_is_the_probability_of_the_ranking() -> None:
    """Over all rankings of four responses the probabilities add up to one."""
    rewards = sample(1, 4)
    total = 0.0
    for ranking in itertools.permutations(range(4)):
        labels = np.empty((1, 4), np.float32)
        labels[0, list(ranking)] = [4, 3, 2, 1]
        ours = math.exp(-loss(rewards, labels=labels, kind="plackett_luce"))
        left, expected = list(ranking), 1.0
        while len(left) > 1:
            powers = np.exp(rewards[0, left].astype(float))
            expected *= powers[0] / powers.sum()
            left.pop(0)
        assert ours == pytest.approx(expected, rel=1e-5)
        total += ours
    assert total == pytest.approx(1.0, rel=1e-5)


def test_equal_labels_do_not_compete() -> None:
    """Best of many: each of two equal winners against the three others, not against one another."""
    rewards = sample(1, 5)
    labels = np.array([[1, 0, 1, 0, 0]], np.float32)
    powers = np.exp(rewards[0].astype(float))
    rest = powers[[1, 3, 4]].sum()
    expected = -sum(math.log(powers[i] / (powers[i] + rest)) for i in (0, 2))
    assert loss(rewards, labels=labels, kind="plackett_luce") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["bradley_terry", "plackett_luce"])
def test_absent_responses_have_no_influence(kind: str) -> None:
    """Whatever their scores and labels are, infinite ones included, and in the gradient too."""
    rewards = sample(3, 4)
    labels = np.tile(np.array([3, 2, 1, 0], np.float32), (3, 1))
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
    few = [run(rewards[i : i + 1, : i + 2], labels=labels[i : i + 1, : i + 2], kind=kind) for i in range(3)]
    expected = few[0] + few[1] + few[2]
    hidden = np.where(mask, rewards, np.array([np.nan, np.inf, -np.inf, 1e30], np.float32))
    given = {"labels": np.where(mask, labels, 99.0), "mask": mask, "kind": kind}
    parts = run(hidden, **given)
    for name in ("loss_sum", "weight_sum", "count", "accuracy_sum", "margin_sum", "reward_sum"):
        assert float(getattr(parts, name)) == pytest.approx(float(getattr(expected, name)), rel=1e-6)
    assert (parts.reward_min, parts.reward_max) == (expected.reward_min, expected.reward_max)
    total = jax.grad(lambda x: run(x, **given, center_rewards_coefficient=0.1).loss_sum)
    gradient = np.asarray(total(jnp.asarray(hidden)))
    assert np.isfinite(gradient).all()
    assert ((gradient != 0) == mask).all()


def test_comparisons_that_say_nothing_count_nowhere() -> None:
    """Equal labels, one response, an empty row."""
    rewards = sample(4, 2)
    labels = np.array([[1, 0], [1, 1], [1, 0], [0, 0]], np.float32)
    mask = np.array([[1, 1], [1, 1], [1, 0], [0, 0]], bool)
    parts = run(rewards, labels=labels, mask=mask, weights=[2.0, 3.0, 4.0, 5.0])
    assert (parts.weight_sum, parts.count, parts.reward_count) == (2.0, 1.0, 2.0)
    assert float(parts.means()["loss"]) == pytest.approx(loss(rewards[:1]), rel=1e-6)
    assert loss(rewards[1:2], labels=labels[1:2]) == 0.0


def test_weights_are_a_weighted_mean() -> None:
    """A user with three comparisons of weight 1/3 counts as much as a user with one."""
    rewards = sample(4, 2)
    single = [loss(rewards[i : i + 1]) for i in range(4)]
    weighted = loss(rewards, weights=[1 / 3, 1 / 3, 1 / 3, 1.0])
    assert weighted == pytest.approx((np.mean(single[:3]) + single[3]) / 2, rel=1e-6)


def test_parts_of_a_batch_add_up_to_it() -> None:
    rewards, weights = sample(6, 3), np.arange(1, 7, dtype=np.float32)
    whole = run(rewards, weights=weights, center_rewards_coefficient=0.01)
    first, *others = (
        run(rewards[i : i + 2], weights=weights[i : i + 2], center_rewards_coefficient=0.01)
        for i in range(0, 6, 2)
    )
    parts = sum(others, start=first)
    for name, value in whole.means().items():
        assert float(parts.means()[name]) == pytest.approx(float(value), rel=1e-6), name


def test_accuracy_is_that_of_evaluation() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 4, (60, 4)).astype(np.float32)  # with ties
    labels = rng.integers(0, 3, (60, 4)).astype(np.float32)
    two = [row for row in range(60) if len(set(labels[row])) > 1]
    wins = sum(winning_margin(rewards[row].tolist(), labels[row].tolist(), id="x") > 0 for row in two)
    parts = run(rewards, labels=labels)
    assert (int(parts.accuracy_sum), int(parts.count)) == (wins, len(two))
    assert float(run([[1.0, 1.0]]).accuracy_sum) == 0.0  # a tie is not a win


def test_rewards_are_described() -> None:
    means = {name: float(value) for name, value in run([[1.0, -3.0], [2.0, 4.0]]).means().items()}
    assert means["reward_std"] == pytest.approx(np.std([1, -3, 2, 4]))
    assert [means[name] for name in ("reward_mean", "reward_min", "reward_max", "margin")] == [1, -3, 4, 1]


def test_large_differences_do_not_overflow() -> None:
    assert loss([[-500.0, 500.0]]) == 1000.0
    assert loss([[500.0, -500.0]]) == 0.0
    assert loss([[-500.0, 500.0, 0.0]], kind="plackett_luce") == pytest.approx(1000.0)
