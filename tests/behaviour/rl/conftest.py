"""The tiny policy that the tests of `prb ppo` start from."""

from pathlib import Path

import pytest

from tests.behaviour.rl.tiny import write_tiny_policy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_policy(folder)
    return folder
