"""A small reward model, which every way of asking for a score is compared with."""

from __future__ import annotations

import pytest

import prb_jax as prb
from tests.scoring.records import write_model


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> prb.RewardModel:
    return prb.load(write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1))
