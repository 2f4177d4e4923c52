"""Benchmarks by name: each is one short file of this package, a source and a rule of scoring.

To add one, write ``prb_jax/records/benchmarks/NAME.py`` with a ``BENCHMARK`` (see ``benchmark.Benchmark``)
and name it in ``NAMES``; a package of your own offers one by an entry point ``prb_jax.benchmarks``, as
`docs/plugins.md` describes. Files of your own need none: ``--data FILE`` reports accuracy.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from prb_jax.seams import Plugin, get_plugin, guarded, plugin_names, usable_plugins

if TYPE_CHECKING:
    from prb_jax.records.benchmarks.benchmark import Benchmark

NAMES: Final = ("prb", "rewardbench", "rewardbench2", "rm-bench", "judgebench", "llmbar", "prefeval")
"""In the order in which they are listed."""


def benchmark_names() -> tuple[str, ...]:
    """Return ``NAMES``, and those of plug-ins."""
    return (*NAMES, *(name for name in plugin_names("benchmarks") if name not in NAMES))


def get_benchmark(name: str) -> Benchmark:
    """The benchmark of one of ``benchmark_names()``.

    Raises:
      KeyError: no benchmark has this name.
      RunError: the package of a plug-in fails, or offers something else.
    """
    if name in NAMES:
        return import_module(f"prb_jax.records.benchmarks.{name.replace('-', '_')}").BENCHMARK
    if name not in benchmark_names():
        raise KeyError(f"no benchmark {name!r}; there are {', '.join(benchmark_names())}")
    from prb_jax.records.benchmarks.benchmark import Benchmark

    return _guarded(get_plugin("benchmarks", name, Benchmark))


def of_repository(repository: str) -> Benchmark | None:
    """The benchmark whose data set on the hub this is, if any."""
    from prb_jax.records.benchmarks.benchmark import Benchmark

    plugins = (one for one in usable_plugins("benchmarks", Benchmark) if one.name not in NAMES)
    known = (*map(get_benchmark, NAMES), *map(_guarded, plugins))
    return next((benchmark for benchmark in known if benchmark.repository == repository), None)


def _guarded(plugin: Plugin) -> Benchmark:
    value = plugin.value
    return replace(
        value, score=guarded(value.score, plugin.origin), record=guarded(value.record, plugin.origin)
    )
