"""Terminal output of `prb best-of-n`: the answer in one sentence, and the quality for each number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prb_jax.behaviour.judges.best_of_n import ORACLE, RANDOM, quality_label
from prb_jax.errors import counted
from prb_jax.reports.table import ResultsTable, interval

if TYPE_CHECKING:
    from rich.console import Group


def render_best_of_n(summary: Mapping[str, Any]) -> Group:
    """Return the answer, and a table of the rewards and numbers of samples of a `summary.json` of `prb best-of-n`."""
    from rich.console import Group
    from rich.text import Text

    curves = summary["curves"]
    lines = [("reward", [f"k={point['k']}" for point in next(iter(curves.values()))])]
    for name, points in curves.items():
        lines.append((name, [interval(point["quality"], point["ci95"]) for point in points]))
    title = f"quality of the best of k: {quality_label(summary['quality'])}"
    return Group(Text(best_of_n_answer(summary)), ResultsTable(title, lines))


def best_of_n_answer(summary: Mapping[str, Any]) -> str:
    """Return which reward chooses best among all samples, beside a random and the best possible choice."""
    last = {name: points[-1] for name, points in summary["curves"].items()}
    bounds = {name: f"{last.pop(name)['quality']:.3f}" for name in (ORACLE, RANDOM)}
    best = max(last, key=lambda name: last[name]["quality"])
    found = interval(last[best]["quality"], last[best]["ci95"]).replace("..", ", ")
    head = (
        f"{best} is the best of {len(last)} rewards: its choice" if len(last) > 1 else f"The choice of {best}"
    )
    return (
        f"{head} among {counted(last[best]['k'], 'sample')} has a quality of {found}. A random choice has "
        f"{bounds[RANDOM]}, and the best possible one {bounds[ORACLE]}."
    )
