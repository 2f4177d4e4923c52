"""Benchmarks by name: each is one short file of this package, a source and a rule of scoring.

To add one, write ``prb_jax/records/benchmarks/NAME.py`` with a ``BENCHMARK`` (see ``benchmark.Benchmark``)
and name it in ``prb_jax.seams.BUILTIN``; a package of your own offers one by an entry point ``prb_jax.benchmarks``, as
`docs/plugins.md` describes. Files of your own need none: ``--data FILE`` reports accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from prb_jax.plugins import errors_of, guarded, usable_plugins
from prb_jax.seams import BUILTIN, Plugin, get, names

if TYPE_CHECKING:
    from prb_jax.records.benchmarks.benchmark import Benchmark, Published

NAMES: Final = tuple(BUILTIN["benchmarks"])
"""Of this package, in the order in which they are listed."""


def get_benchmark(name: str) -> Benchmark:
    """The benchmark of a name, of this package or a plug-in.

    Raises:
      KeyError: The name is unknown.
      RunError: The package of a plug-in fails, or provides another type.
    """
    if name not in names("benchmarks"):
        raise KeyError(f"no benchmark {name!r}; there are {', '.join(names('benchmarks'))}")
    return _guarded(get("benchmarks", name))


def of_repository(repository: str) -> Benchmark | None:
    """Return the benchmark with this data set on the hub, if any."""
    known = (*map(get_benchmark, NAMES), *map(_guarded, usable_plugins("benchmarks")))
    return next((benchmark for benchmark in known if benchmark.repository == repository), None)


def _guarded(plugin: Plugin) -> Benchmark:
    value = plugin.value
    if not plugin.origin:
        return value
    records = value.records

    def guarded_records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with errors_of(plugin.origin):
            yield from records(published)

    return replace(
        value,
        score=guarded(value.score, plugin.origin),
        record=guarded(value.record, plugin.origin),
        records=None if records is None else guarded_records,
    )
