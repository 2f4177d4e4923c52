"""Options of `prb ppo`: each is used by the algorithm that is chosen, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.behaviour.rl.sections import ALGORITHMS
from prb_jax.behaviour.rl.settings import PpoSettings, default_config, load_ppo_settings, used_by
from prb_jax.records.options import flat_settings
from tests.behaviour.rl.tiny import write_config

DEFAULTS = flat_settings(PpoSettings())
USERS = {key: used_by(key) for key in DEFAULTS}
CHOICES: dict[str, Any] = {
    "scoring.no_end": "subtract", "scoring.protocol": "paper", "scoring.dtype": "bfloat16", "scoring.mesh": "fsdp=1",
    "scoring.tokenizer": "t", "scoring.history": "FILE", "scoring.reference": "BASE", "scoring.logprobs": "average",
    "scoring.judge.template": "FILE", "scoring.judge.system": "FILE", "scoring.judge.pairing": "circular",
    "scoring.judge.ties": "loss", "scoring.judge.chat_template_kwargs": "{}", "kl.place": "loss",
    "kl.estimator": "k3", "loss.ratio": "sequence", "loss.aggregation": "sequence-mean-token-sum",
    "loss.label_smoothing": 0.1, "value.trunk": "shared",
}  # fmt: skip
NOT_ALONE = ("kl.horizon", "scoring.no_end_value", "scoring.free_tokens", "watch.every", "watch.window")


def other(key: str) -> Any:
    """A value that the key may have and does not have by default."""
    default = DEFAULTS[key]
    if key in CHOICES:
        return CHOICES[key]
    if isinstance(default, bool):
        return not default
    if default is None:
        return 3
    return (default / 2 or 0.5) if isinstance(default, float) else default + 2


def load(**changes: Any) -> PpoSettings:
    return load_ppo_settings(changes, complete=False)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_that_the_algorithm_does_not_use_is_refused_by_name(algorithm: str) -> None:
    keys = [key for key in DEFAULTS if len(USERS[key]) < len(ALGORITHMS)]
    assert len(keys) > 40
    assert load(**{"algorithm": algorithm, **{key: DEFAULTS[key] for key in keys}}).algorithm == algorithm
    for key in keys:
        users = USERS[key]
        if algorithm not in users:
            message = f"^{key}: expected .* algorithm={algorithm.replace('+', '[+]')}, .*{users[0]}.* found "
            with pytest.raises(prb.DataError, match=message):
                load(**{"algorithm": algorithm, key: other(key)})
        elif key not in NOT_ALONE:
            assert flat_settings(load(**{"algorithm": algorithm, key: other(key)}))[key] == other(key)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning": "full", "lora.rank": 4}, r"lora.rank: needs tuning=lora"),
        ({"kl.horizon": 5.0}, r"kl.horizon: needs kl.target"),
        ({"kl.coefficient": 0.0, "kl.target": 3.0}, r"kl.target: needs a kl.coefficient above 0"),
        ({"scoring.no_end_value": 3.0}, r"scoring.no_end_value: needs scoring.no_end"),
        ({"scoring.free_tokens": 3}, r"scoring.free_tokens: needs scoring.token_penalty"),
        ({"watch.every": 3}, r"watch.every: needs watch.gold"),
        ({"watch.window": 3}, r"watch.window: needs watch.gold"),
        ({"watch.data": "FILE"}, r"watch.data: needs watch.gold"),
        ({"algorithm": "dpo", "watch.gold": "baseline:length"}, r"'watch.gold': dpo .* expected watch.data"),
        ({"scoring.no_end": "subtract", "scoring.no_end_value": -1.0}, r"no_end_value: expected at least 0"),
        ({"epochs": 1.0, "steps": 7}, r"'steps': epochs=1 says how long the run is"),
        ({"epochs": 0.0}, r"epochs: expected more than 0"),
    ],
)
def test_a_key_that_needs_another_one_is_refused_without_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(prb.PrbError, match=message):
        load(**changes)


def test_epochs_that_are_asked_for_take_the_place_of_the_steps_of_a_config(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"steps": 1000})
    settings = load_ppo_settings(config, ["epochs=2"], complete=False)
    assert settings.with_steps(40 * settings.batch.prompts).steps == 80
    with pytest.raises(prb.RunError, match=r"'steps': epochs=2 says how long the run is"):
        load_ppo_settings(config, ["epochs=2", "steps=7"], complete=False)


def test_a_config_in_python_is_checked_too(tmp_path: Path) -> None:
    config: Any = default_config()
    config.algorithm = "grpo"
    config.advantage.lam = 0.9
    with pytest.raises(prb.DataError, match=r"advantage.lam: .* algorithm=grpo, .*\(ppo does\), found 0.9"):
        load_ppo_settings(config, complete=False)
    file = write_config(tmp_path, {"algorithm": "dpo", "rollout.n": 7})
    with pytest.raises(prb.DataError, match=r"rollout.n: .*algorithm=dpo, .*\(ppo, grpo, .* do\), found 7"):
        load_ppo_settings(file, complete=False)
