"""Benchmarks by name: each is one short file of this package, a source and a rule of scoring.

To add one, write ``prb_jax/benchmarks/NAME.py`` with a ``BENCHMARK`` (see ``benchmark.Benchmark``)
and name it in ``NAMES``. Files of your own need none: ``--data FILE`` reports accuracy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prb_jax.benchmarks.benchmark import Benchmark

NAMES: Final = ("prb", "rewardbench", "rewardbench2", "rm-bench", "judgebench", "llmbar", "prefeval")
"""In the order in which they are listed."""


def get_benchmark(name: str) -> Benchmark:
    """The benchmark of one of ``NAMES``.

    Raises:
      KeyError: there is none of this name.
    """
    if name not in NAMES:
        raise KeyError(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
    return import_module(f"prb_jax.benchmarks.{name.replace('-', '_')}").BENCHMARK


def of_repository(repository: str) -> Benchmark | None:
    """The benchmark whose data set on the hub this is, if any."""
    return next((b for b in map(get_benchmark, NAMES) if b.repository == repository), None)
