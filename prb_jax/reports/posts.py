"""Accuracy by the number of posts that a model sees, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from prb_jax.reports.style import new_table, signed
from prb_jax.reports.table import interval


def render_posts(points: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Return a line for each of the points of `posts.json`.

    Args:
      points: as of `prb_jax.scoring.posts.PostsSweep`.
      title: above the table.
    """
    fewest = points[0]["profile_posts"]
    table = new_table(title, ("posts", "accuracy", f"minus that with {fewest}", "cut"))
    for point in points:
        gain = (
            "" if point["profile_posts"] == fewest else signed(point["difference"], point["difference_ci95"])
        )
        cells = [f"{point['profile_posts']}", interval(point["accuracy"], point["ci95"]), gain]
        table.add_row(*map(escape, cells), f"{point['truncated']:,}")
    table.caption = escape(
        f"[..] 95 % interval; {points[0]['n']:,} comparisons; cut: comparisons whose text was cut"
    )
    return table
