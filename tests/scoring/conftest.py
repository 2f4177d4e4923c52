"""One tiny reward model, and comparisons with their scores, for all tests of scoring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.scoring.reward_model import RewardModel
from tests.scoring.records import record, write_model


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="package")
def model(folder: Path) -> RewardModel:
    return prb.load(folder)


@pytest.fixture(scope="package")
def mixed() -> list[prb.Comparison]:
    """Two to four responses, none to three posts."""
    return [record(number, 2 + number % 3) for number in range(12)]


@pytest.fixture(scope="package")
def scores(model: RewardModel, mixed: list[prb.Comparison]) -> list[np.ndarray]:
    return model.score(mixed)
