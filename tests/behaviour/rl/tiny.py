"""A tiny policy, prompts of two users with opposite tastes, and short settings for the tests of `prb ppo`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.records.comparison import Comparison
from tests.json_lines import read_lines, write_lines
from tests.tiny_policies import write_policy

END = 3  # <|end|> of the tiny tokenizer
LETTER = "e"
BANDIT = {
    "algorithm": "rloo",
    "rollout.max_new_tokens": 1,
    "kl.coefficient": 0.0,
    "rollout.n": 8,
    "checkpoint.every": 40,
}
"""Settings of a bandit: one token, and one reward."""


def write_tiny_policy(folder: Path, **overrides: Any) -> Any:
    """One layer of Qwen 3; returns transformers' model."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    return write_policy(folder, "qwen3", eos=END, max_position_embeddings=256, **{**sizes, **overrides})


def rows(count: int = 8) -> list[dict[str, Any]]:
    """The same question of two users, who are told apart by their profiles alone."""
    posts = {"ana": "yes " * 6, "bo": "no " * 6}
    return [
        {
            "id": f"q{k}", "user_id": user, "question": "Tea?", "chosen": "here", "rejected": "sun",
            "profile": [{"id": "p", "text": posts[user]}],
        }
        for k, user in ((k, ("ana", "bo")[k % 2]) for k in range(count))
    ]  # fmt: skip


def comparisons(count: int = 8) -> list[Comparison]:
    return [Comparison.from_row(row, where="test") for row in rows(count)]


def write_rows(path: Path, count: int = 8) -> Path:
    write_lines(path, rows(count))
    return path


def has_letter(comparison: Comparison) -> Sequence[float]:
    """1 for a text with the letter, else 0: the best policy gets 1."""
    return [float(LETTER in text) for text in comparison.responses]


def by_taste(comparison: Comparison) -> Sequence[float]:
    """Ana wants the letter and Bo does not: one who cannot tell them apart gets a half, whatever it writes."""
    wanted = comparison.user_id == "ana"
    return [float((LETTER in text) == wanted) for text in comparison.responses]


def settings(model: Path, **changes: Any) -> dict[str, Any]:
    """Dotted keys of a short run."""
    return {
        "model": str(model), "steps": 3, "tuning": "full", "rollout.n": 4, "rollout.max_new_tokens": 6,
        "batch.prompts": 8, "scoring.empty": 0.0, "optimizer.learning_rate": 1e-2, "log.tensorboard": False,
        "log.plot": False, "checkpoint.every": 1, **changes,
    }  # fmt: skip


def without_rollouts(given: dict[str, Any]) -> dict[str, Any]:
    """The same settings for dpo, which draws nothing."""
    return {key: value for key, value in given.items() if key.partition(".")[0] not in ("rollout", "scoring")}


def metrics(out: Path) -> list[dict[str, float]]:
    """Rows of `metrics.jsonl` without what the clock says."""
    return [
        {name: value for name, value in row.items() if not name.endswith(("second", "seconds"))}
        for row in read_lines(out / "metrics.jsonl")
    ]


def write_reward(folder: Path) -> str:
    """A file with the function :func:`has_letter`; returns how a config names it."""
    text = f"def score(one):\n    return [float({LETTER!r} in text) for text in one.responses]\n"
    (folder / "reward.py").write_text(text)
    return f"{folder}/reward.py:score"


def write_config(folder: Path, keys: Mapping[str, Any]) -> Path:
    """A config with these keys."""
    path = folder / "config.py"
    values = json.loads(json.dumps(dict(keys), default=str))  # paths as texts
    path.write_text(f"def get_config():\n    return {values!r}\n")
    return path


def gae_by_definition(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """The generalised advantage as its definition says: a sum over all later temporal differences."""
    advantages = np.zeros(rewards.shape)
    for row in np.ndindex(lengths.shape):
        for t in range(lengths[row]):
            for later in range(t, lengths[row]):
                following = values[row][later + 1] if later + 1 < lengths[row] else 0.0
                delta = rewards[row][later] + gamma * following - values[row][later]
                advantages[row][t] += (gamma * lam) ** (later - t) * delta
    return advantages
