"""Pairs in a file, `prb evaluate` of a baseline on them in this process, and other processes and their environment."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prb_jax import cli
from tests.json_lines import write_lines
from tests.training.tiny import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny reward model."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    pairs = [
        {"id": i, "user_id": f"u{i % 3}", "question": "?", "chosen": "long " * (i % 4), "rejected": "short 2"}
        for i in range(1, 12)
        if i % 4
    ]
    return Path(write_lines(tmp_path / "pairs.jsonl", pairs))


@pytest.fixture
def evaluate(data: Path, tmp_path: Path) -> Callable[..., int]:
    """Gives the exit status; the run lies in the folder "run" unless the words name another."""

    def run(*words: object, model: str = "baseline:length") -> int:
        command = ["evaluate", model, "--data", data, "--out", tmp_path / "run", *words]
        return cli.main(list(map(str, command)))

    return run
