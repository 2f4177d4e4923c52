"""Run folders of `prb train` and `prb ppo`: names and contents of their files.

`prb_jax.training.record` defines and writes the contents.
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
from prb_jax.runs.kind import RUN, SUMMARY, RunKind

CHECKPOINTS = "checkpoints"
BEHAVIOUR = "behaviour.json"
METRICS = "metrics.jsonl"
CURVES = "learning_curves.png"
ROLLOUTS = "rollouts.jsonl"


class TrainingInputs(TypedDict):
    """The inputs of a training run that other code reads."""

    settings: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    lengths: NotRequired[list[int]]


class TrainFigures(TypedDict):
    """Means over comparisons; there may be further ones."""

    loss: float
    accuracy: float
    margin: float


class TrainSummary(TypedDict):
    """Contents of ``summary.json`` of a run of `prb train`."""

    steps: int
    exported_step: int
    train_comparisons: int
    validation_comparisons: int
    pairs_seen: int
    tokens_seen: int
    parameters: int
    trained_parameters: int
    last_tenth: TrainFigures
    validation: TrainFigures | None


class PolicySummary(TypedDict):
    """Contents of ``summary.json`` of a run of `prb ppo`."""

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
    """Contents of the folder of a training run."""

    kind: RunKind  # `TRAINING` or `POLICY_RUN`
    record: Mapping[str, Any]  # contents of ``train.json``
    summary: Mapping[str, Any] | None  # contents of ``summary.json``; None if unfinished

    __repr__ = short_repr


def read_training(folder: Path) -> TrainingRun:
    """Return the training run in a folder.

    Raises:
      RunError: there is no run in the folder, or a file of the run cannot be read or is damaged.
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
    """Identity of a checkpoint's run: the digest of all inputs but the length, and the lengths requested so far."""

    inputs: str
    lengths: list[int]


def run_identity(folder: Path) -> RunIdentity:
    """Return the identity of the run in a folder that this process has locked.

    Raises:
      RunError: the folder lacks a training run.
    """
    inputs = read_training(folder).record["inputs"]
    settings = {name: value for name, value in inputs["settings"].items() if name != "steps"}
    deciding = {**inputs, "settings": settings}
    lengths = deciding.pop("lengths", [inputs["settings"].get("steps")])
    return {
        "inputs": hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest(),
        "lengths": lengths,
    }
