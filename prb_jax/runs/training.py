"""The folders of `prb train` and `prb ppo`: the names of their files, and what they say.

`prb_jax.training.record` says what the files hold, and writes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

from prb_jax.errors import RunError, short_repr
from prb_jax.models.checkpoints.locate import MODEL, TRAIN
from prb_jax.records.reading import read_json
from prb_jax.records.schema import check_schema
from prb_jax.runs.behaviour import BEHAVIOUR
from prb_jax.runs.kind import RUN, SUMMARY, RunKind

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"


class TrainingInputs(TypedDict):
    """The inputs of a training run that other code reads."""

    settings: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    lengths: NotRequired[list[int]]


class TrainSummary(TypedDict):
    """What ``summary.json`` holds of a run of `prb train`."""

    steps: int
    exported_step: int
    train_comparisons: int
    validation_comparisons: int
    pairs_seen: int
    tokens_seen: int
    parameters: int
    trained_parameters: int
    last_tenth: dict[str, float]
    validation: dict[str, float] | None


class PolicySummary(TypedDict):
    """What ``summary.json`` holds of a run of `prb ppo`."""

    algorithm: str
    reward: str | None
    steps: int
    first: dict[str, float]
    last_tenth: dict[str, float]
    definitions: dict[str, str]
    ended_by_watch: NotRequired[str]


_FILES: Final[Mapping[str, Any]] = {
    "file": TRAIN,
    "inputs": TrainingInputs,
    "sealed": (METRICS, ROLLOUTS, BEHAVIOUR, f"{MODEL}/*"),
}
TRAINING = RunKind("prb_jax training", "prb train", others=(RUN, CHECKPOINTS, MODEL), **_FILES)
POLICY_RUN = RunKind(
    "prb_jax policy training", "prb ppo", others=(RUN, CHECKPOINTS, MODEL, ROLLOUTS), **_FILES
)


@dataclass(frozen=True)
class TrainingRun:
    """What the folder of a training run says."""

    kind: RunKind  # `TRAINING` or `POLICY_RUN`
    record: Mapping[str, Any]  # what ``train.json`` holds
    summary: Mapping[str, Any] | None  # what ``summary.json`` holds; None for a run that is not finished

    __repr__ = short_repr


def read_training(folder: Path) -> TrainingRun:
    """Return the training run in a folder.

    Raises:
      RunError: there is none, or a file of it cannot be read or is not the one that was written.
    """
    recorded = read_json(folder / TRAIN, error=RunError)
    is_policy = isinstance(recorded, dict) and recorded.get("kind") == POLICY_RUN.name
    kind = POLICY_RUN if is_policy else TRAINING
    record, path = kind.read(folder), folder / SUMMARY
    assert record is not None
    if not path.is_file():
        return TrainingRun(kind, record, None)
    kind.check_files(folder, record)
    summary = read_json(path, error=RunError)
    check_schema(summary, PolicySummary if is_policy else TrainSummary, where=str(path), error=RunError)
    return TrainingRun(kind, record, summary)


class RunIdentity(TypedDict):
    """Which run a checkpoint is of: the digest of all inputs but the length, and the lengths given so far."""

    inputs: str
    lengths: list[int]


def run_identity(folder: Path) -> RunIdentity:
    """Return the identity of the run in a folder, which is held by this process.

    Raises:
      RunError: there is no training run in it.
    """
    inputs = read_training(folder).record["inputs"]
    settings = {name: value for name, value in inputs["settings"].items() if name != "steps"}
    deciding = {**inputs, "settings": settings}
    lengths = deciding.pop("lengths", [inputs["settings"].get("steps")])
    return {
        "inputs": hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest(),
        "lengths": lengths,
    }
