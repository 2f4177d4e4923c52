"""The tiny checkpoint that all tests of training start from, and a file of forty pairs."""

from pathlib import Path

import pytest

from tests.training.tiny import rows, write_model, write_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows(40))
