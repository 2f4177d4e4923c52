"""What `train.json` and `summary.json` say of a run of `prb ppo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.reading import read_json
from prb_jax.errors import RunError
from prb_jax.rl.learner import Learner
from prb_jax.rl.rewards import Reward
from prb_jax.rl.rollouts import ROLLOUTS
from prb_jax.rl.settings import PpoSettings
from prb_jax.rl.watch import Rows, held_out_summary
from prb_jax.runs.kind import RunFolder, RunKind
from prb_jax.scoring.inputs import Inputs
from prb_jax.training.curves import PANELS, Panels
from prb_jax.training.folder import CHECKPOINTS, MODEL, TRAIN
from prb_jax.training.record import computing_versions, session_on, settings_with
from prb_jax.training.splits import TrainingData

POLICY_RUN = RunKind(
    "prb_jax policy training",
    "prb ppo",
    file=TRAIN,
    others=("run.json", CHECKPOINTS, MODEL, ROLLOUTS),
)
_PANELS: Panels = (
    ("reward", "Reward"), ("gold", "Gold"), ("kl", "KL to the reference"), ("entropy", "Entropy"), ("length", "Tokens")
)  # fmt: skip

_DEFINITIONS = {
    "reward": "the reward's score of a rollout, scaled: its mean",
    "score": "the same after the rules for rollouts that are cut or long",
    "kl": "log p(policy) - log p(reference) summed over a rollout: its mean, at the temperature of the rollouts",
    "entropy": "of the distribution of a token, in nats: the mean over tokens",
    "clip_share": "share of tokens whose gradient the clip takes away",
    "old_kl": "log p(when drawn) - log p(now) of a token: the mean over tokens and updates",
    "explained_variance": "1 - var(returns - values) / var(returns)",
    "equal_groups": "prompts whose rollouts all have the same score, which group advantages learn nothing from",
    "gold": "the score of the second reward, which is not trained on: the mean",
    "distinct_1": "share of different words among all words of the rollouts of a step; distinct_2 of pairs of words",
    "held_out": "means over the trained policy's texts for watch.data: all, and by subset; 95 % t intervals over users",
    "ended_share": "share of rollouts that end by a stop token",
    "sampler_difference": "largest difference of a token's log-probability between the sampler and the training pass",
}


def run_inputs(
    settings: PpoSettings,
    data: TrainingData,
    learner: Learner,
    reward: Reward | None,
    gold: Reward | None,
    held_out: Inputs | None,
) -> dict[str, Any]:
    """Return everything that decides the result, JSON-ready."""
    chosen = settings_with(settings, "result") | {
        "kl.place": "reward" if settings.kl_in_reward else "loss",
        "kl.estimator": settings.kl_estimator,
        "scoring.no_end_value": settings.scoring.value_of_no_end,
    }
    identity = dict(learner.policy.identity())
    identity.pop("name")
    return {
        "settings": chosen,
        "model": identity,
        "reward": None if reward is None else reward.identity(),
        "gold": None if gold is None else gold.identity(),
        "data": {"sources": dict(data.sources), "train": len(data.train)},
        **({} if held_out is None else {"held_out": held_out.to_json()}),
        "versions": computing_versions(),
    }


def read_ppo_run(path: Path) -> dict[str, Any] | None:
    """Return what ``train.json`` says; None where there is none.

    Raises:
      RunError: it cannot be read or is of another kind, or the folder holds a run of another verb.
    """
    return POLICY_RUN.read(path)


def is_ppo_run(path: Path) -> bool:
    """Tell whether a folder holds a run of `prb ppo`.

    Raises:
      RunError: its ``train.json`` cannot be read.
    """
    found = read_json(path / TRAIN, error=RunError, optional=True)
    return isinstance(found, dict) and found.get("kind") == POLICY_RUN.name


def panels_of(rows: Sequence[Mapping[str, Any]]) -> Panels:
    """Return what is drawn of these rows of metrics; of labelled data the loss, and accuracy and margin of pairs."""
    panels = _PANELS if any("reward" in row for row in rows) else PANELS
    return tuple(panel for panel in panels if any(panel[0] in row for row in rows))


def open_ppo_run(
    path: Path,
    inputs: Mapping[str, Any],
    learner: Learner,
    *,
    reward: Reward | None,
) -> AbstractContextManager[RunFolder]:
    """Open the run folder, and write to ``train.json`` that the run is started once more.

    Raises:
      RunError: the folder holds another run.
    """
    names = {"model": learner.policy.name, "reward": None if reward is None else reward.name}
    session = session_on(learner.mesh, learner.settings)
    return POLICY_RUN.open(path, inputs, session=session, notes=names)


def run_summary(
    settings: PpoSettings,
    rows: Sequence[Mapping[str, Any]],
    prompts: int,
    reward: Reward | None,
    reason: str | None,
    held_out: Rows,
) -> dict[str, Any]:
    """Return the numbers of a finished run, JSON-ready.

    Args:
      settings: of the run.
      rows: of its `metrics.jsonl`.
      prompts: of the data.
      reward: None for dpo and sft.
      reason: why the watch ended it; None where it did not.
      held_out: texts for prompts that were not trained on; empty where there are none.
    """
    tail = rows[-max(1, len(rows) // 10) :]
    names = [
        name
        for name in ("reward", "score", "kl", "entropy", "clip_share", "length", "ended_share", "explained_variance",
                     "loss", "accuracy", "margin")
        if name in rows[0]
    ]  # fmt: skip

    def mean(part: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return {name: float(np.mean([row[name] for row in part])) for name in names}

    return {
        "algorithm": settings.algorithm,
        "reward": None if reward is None else reward.name,
        "steps": len(rows),
        **({} if reason is None else {"ended_by_watch": reason}),
        "prompts": prompts,
        "prompts_seen": len(rows) * settings.batch.prompts,
        "tokens_seen": int(sum(row["tokens"] for row in rows)),
        "first": mean(rows[:1]),
        "last_tenth": mean(tail),
        **({"held_out": held_out_summary(held_out)} if held_out else {}),
        "definitions": _DEFINITIONS,
    }
