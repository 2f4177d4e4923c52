"""From scores to advantages, each algorithm against numpy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.rl.credit import credit
from prb_jax.behaviour.rl.sections import AdvantageSettings, KlSettings, ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from tests.behaviour.rl.tiny import gae_by_definition

RNG = np.random.default_rng(5)
LENGTHS = np.array([[3, 1], [2, 4]])
COLUMNS = 4
MASK = np.arange(COLUMNS) < LENGTHS[..., None]
SCORES = RNG.standard_normal(LENGTHS.shape)
ENDED = np.array([[True, True], [False, True]])
NEW, REFERENCE = (np.where(MASK, RNG.standard_normal(MASK.shape), 0.0) for _ in range(2))
VALUES = RNG.standard_normal((*LENGTHS.shape, COLUMNS + 1))
COEFFICIENT = 0.3


def credited(**changes: Any) -> Any:
    scoring = ScoringSettings(no_end="subtract", no_end_value=2.0)
    settings = PpoSettings(**{"scoring": scoring, **changes})
    arrays = (SCORES, ENDED, LENGTHS, NEW, REFERENCE, VALUES, COEFFICIENT)
    with jax.disable_jit():
        return credit(*map(jnp.asarray, arrays), settings=settings)


def whitened(values: np.ndarray, mask: np.ndarray, *, shift: bool) -> np.ndarray:
    real = values[mask]
    scaled = (values - real.mean()) / np.sqrt(real.var(ddof=1) + 1e-8) + (0.0 if shift else real.mean())
    return np.where(mask, scaled, 0.0)


def token_rewards(extra: int) -> np.ndarray:
    """[B, K, R + 1]: minus the KL of each token, and the score at the last one, or behind it."""
    rewards = np.pad(-COEFFICIENT * (NEW - REFERENCE), ((0, 0), (0, 0), (0, 1)))
    for place in np.ndindex(LENGTHS.shape):
        rewards[place][LENGTHS[place] - 1 + extra] += SCORES[place] - 2.0 * (not ENDED[place])
    return rewards


@pytest.mark.parametrize("at_end", [False, True])
def test_ppo(at_end: bool) -> None:
    chosen = AdvantageSettings(gamma=0.9, lam=0.8, value_at_end=at_end, whiten_rewards=True)
    ours = credited(advantage=chosen)
    states = np.arange(COLUMNS + 1) < LENGTHS[..., None] + at_end
    rewards = whitened(token_rewards(at_end), states, shift=False)
    values = np.where(states, VALUES, 0.0)
    advantages = gae_by_definition(rewards, values, LENGTHS + at_end, 0.9, 0.8)
    np.testing.assert_array_equal(np.asarray(ours.value_mask) > 0, states)
    np.testing.assert_allclose(ours.returns, np.where(states, advantages + values, 0.0), atol=1e-5)
    np.testing.assert_allclose(ours.advantages, whitened(advantages[..., :-1], MASK, shift=True), atol=1e-5)
    spread = (advantages[states] + values[states]).var(ddof=1)
    assert float(ours.numbers["explained_variance"]) == pytest.approx(
        1 - advantages[states].var(ddof=1) / spread, abs=1e-4
    )


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_groups(place: Any) -> None:
    kl = KlSettings(place=place, estimator="k1" if place == "reward" else "k3")
    totals = SCORES - 2.0 * ~ENDED - (COEFFICIENT * (NEW - REFERENCE).sum(-1) if place == "reward" else 0.0)
    centred = totals - totals.mean(1, keepdims=True)
    scaled = centred / (totals.std(1, ddof=1, keepdims=True) + 1e-4)
    unscaled = AdvantageSettings(scale_groups=False)
    if place == "loss":
        ours = credited(algorithm="grpo", kl=kl).advantages
        np.testing.assert_allclose(ours, scaled[..., None] * MASK, atol=1e-4)
    else:
        with pytest.raises(prb.DataError, match=r"kl.place: expected loss with algorithm=grpo"):
            credited(algorithm="grpo", kl=kl)
    grpo = credited(algorithm="grpo", kl=kl, advantage=unscaled).advantages
    rloo = credited(algorithm="rloo", kl=kl).advantages
    np.testing.assert_allclose(grpo, centred[..., None] * MASK, atol=1e-5)
    np.testing.assert_allclose(rloo, 2 * centred[..., None] * MASK, atol=1e-5)


@pytest.mark.parametrize(("rule", "expected"), [("subtract", SCORES - 1.0), ("replace", -np.ones((2, 2)))])
def test_it_never_pays_by_default_to_be_cut(rule: Any, expected: np.ndarray) -> None:
    ours = credited(algorithm="rloo", kl=KlSettings(place="loss"), scoring=ScoringSettings(no_end=rule))
    assert float(ours.numbers["score"]) == pytest.approx(np.where(ENDED, SCORES, expected).mean(), abs=1e-6)


def test_reinforce_and_what_is_reported() -> None:
    ours = credited(algorithm="reinforce++", advantage=AdvantageSettings(gamma=0.5))
    returns = gae_by_definition(token_rewards(0)[..., :-1], np.zeros(MASK.shape), LENGTHS, 0.5, 1.0)
    np.testing.assert_allclose(ours.advantages, whitened(returns, MASK, shift=True), atol=1e-5)
    numbers = {name: float(value) for name, value in ours.numbers.items()}
    assert numbers["reward"] == pytest.approx(SCORES.mean(), abs=1e-6)
    assert numbers["score"] == pytest.approx(SCORES.mean() - 0.5, abs=1e-6)
    assert (numbers["length"], numbers["ended_share"], numbers["equal_groups"]) == (2.5, 0.75, 0.0)


def test_prompts_whose_rollouts_have_one_score_are_counted_and_teach_nothing(monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "SCORES", np.array([[0.3, 0.3], [1.0, 2.0]]))
    monkeypatch.setitem(globals(), "ENDED", np.ones((2, 2), bool))
    for algorithm, changes in {"grpo": {}, "rloo": {"kl": KlSettings(place="loss")}}.items():
        ours = credited(algorithm=algorithm, **changes)
        assert float(ours.numbers["equal_groups"]) == 1.0
        assert not np.asarray(ours.advantages)[0].any()
        assert np.asarray(ours.advantages)[1].any()
