"""Processes that tests start: `prb` itself, what they inherit, and how fast their programs compile.

    python -m tests.plain_process

prints the flags with which XLA compiles for a CPU about three times as fast, and makes slower programs of the same
arithmetic. `make test` sets them; `make test-all` and a plain `pytest` compile as users do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def prb_command(*words: object) -> list[str]:
    """Return the command line of a verb, run by this Python."""
    return [sys.executable, "-m", "prb_jax", *map(str, words)]


def prb(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a verb as a process of its own in the repository's root, and return what it said."""
    settings = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 300, **options}
    return subprocess.run(prb_command(*words), **settings)


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fast_compilation() -> list[str]:
    """Return the flags that this version of jax knows: it ends the process for a flag that it does not know."""
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if version("jax").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return flags


def plain_environment(*, devices: int | None = None) -> dict[str, str]:
    """Return the environment of this process without variables that somebody set for jax, but for fast compilation.

    Args:
      devices: CPU devices that a process has; jax decides where it is None.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag in fast_compilation()]
    if devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    return plain | ({"XLA_FLAGS": " ".join(flags)} if flags else {})


if __name__ == "__main__":
    print(" ".join(fast_compilation()))
