"""The folders of `prb train` and `prb ppo`: the names of their files, and which of the two one is.

`prb_jax.training.record` says what the files hold, and writes them.
"""

from __future__ import annotations

from pathlib import Path

from prb_jax.checkpoints.locate import MODEL, TRAIN
from prb_jax.data.reading import read_json
from prb_jax.errors import RunError
from prb_jax.runs.kind import RUN, RunKind

CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts.jsonl"
TRAINING = RunKind("prb_jax training", "prb train", file=TRAIN, others=(RUN, CHECKPOINTS, MODEL))
POLICY_RUN = RunKind(
    "prb_jax policy training",
    "prb ppo",
    file=TRAIN,
    others=(RUN, CHECKPOINTS, MODEL, ROLLOUTS),
)


def is_policy_run(folder: Path) -> bool:
    """Tell whether a folder holds a run of `prb ppo`.

    Raises:
      RunError: its ``train.json`` cannot be read.
    """
    recorded = read_json(folder / TRAIN, error=RunError, optional=True)
    return isinstance(recorded, dict) and recorded.get("kind") == POLICY_RUN.name
