"""Processes that tests start: what they inherit, and how fast their programs compile.

    python -m tests.plain_process

prints the flags with which XLA compiles for a CPU about three times as fast, and makes slower programs of the same
arithmetic. `make test` sets them; `make test-all` and a plain `pytest` compile as users do.
"""

from __future__ import annotations

import os
from importlib.metadata import version


def fast_compilation() -> list[str]:
    """Return the flags that this version of jax knows: it ends the process for a flag that it does not know."""
    flags = ["--xla_backend_optimization_level=0"]
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
