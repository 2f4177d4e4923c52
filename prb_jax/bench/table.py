"""The table of `prb bench score` and `prb bench train`: what they have in common, and what each adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from prb_jax.reports.style import ResultsTable


class Column(NamedTuple):
    """A heading, and the cell of a result."""

    name: str
    cell: Callable[[Any], str]


def rates_table(
    results: Sequence[Any],
    *,
    title: str,
    kind: Callable[[Any], str] = lambda r: r.dtype,
    workload: Callable[[Any], str],
    rate: Column,
    more: Sequence[Column] = (),
    rival_name: str | None,
    difference: Column,
    last: Sequence[Column] = (),
) -> ResultsTable:
    """Return all results, a column each.

    Args:
      results: of :class:`prb_jax.bench.scoring.ScoringResult` or :class:`prb_jax.bench.training.TrainingResult`.
      title: above the table.
      kind: names what it was computed in.
      workload: names what was timed.
      rate: comparisons a second.
      more: columns after those that all have.
      rival_name: what was timed beside, if anything: its columns follow.
      difference: between the two.
      last: further columns about what was timed beside.
    """
    columns = [
        Column("dtype", kind),
        Column("workload", workload),
        rate,
        Column("tokens/s", lambda r: f"{r.tokens_per_second:,.0f}"),
        Column("padding", lambda r: f"{r.padding_waste:.0%}"),
        Column("compiles", lambda r: str(r.compiles)),
        Column("compile s", lambda r: f"{r.compile_seconds:.1f}"),
        Column("of matmul peak", lambda r: f"{r.peak_share:.0%} of {r.peak_gflops:,.0f} GFLOP/s"),
        *more,
    ]
    if rival_name:
        columns += [
            Column(f"{rival_name} {rate.name}", lambda r: f"{r.against_pairs_per_second:.3f}"),
            Column("its padding", lambda r: f"{r.against_padding_waste:.0%}"),
            Column("speed-up", lambda r: f"{r.speedup:.2f}x"),
            difference,
            *last,
        ]
    return ResultsTable(
        title, [(column.name, [column.cell(result) for result in results]) for column in columns]
    )
