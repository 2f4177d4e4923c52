"""Compiled programs are kept between tests, processes and runs, in the cache that `prb` uses.

`--fast` skips every test at the moment when it would start another process (`make test-fast`).
"""

import gc
import os
import subprocess
from typing import Any

import pytest

from prb_jax.commands.process import enable_compilation_cache

# The tests make their own fake devices; where libtpu is installed to compile for TPUs, jax would look for a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
enable_compilation_cache()
# Tracing makes millions of objects that stay: looking through them all again and again takes a tenth of the time.
gc.set_threshold(50_000, 20, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="skip tests that start another process")


@pytest.fixture(autouse=True, scope="session")
def _without_processes(request: pytest.FixtureRequest) -> Any:
    """With --fast, a process that is about to start skips its test instead."""
    if not request.config.getoption("--fast"):
        yield
        return

    def skip(self: subprocess.Popen[Any], *_: Any, **__: Any) -> None:
        self.returncode = 0  # read when the object goes
        pytest.skip("starts a process: in make test, not in make test-fast")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", skip)
        yield
