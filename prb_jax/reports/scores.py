"""The sections of a page about scores: margins, calibration, length of responses, posts of the profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.calibration import CALIBRATION_DEFINITION, calibration
from prb_jax.metrics.length import LENGTH_DEFINITION, length_bias
from prb_jax.metrics.uncertainty import accuracy_interval
from prb_jax.reports.blocks import Block, Cell, PageTable, Paragraph
from prb_jax.reports.cells import figure_cell
from prb_jax.reports.drawings import draw_margins, draw_points, draw_reliability
from prb_jax.reports.texts import Texts, posts_seen
from prb_jax.runs.finished import FinishedRun


def score_blocks(run: FinishedRun) -> Iterator[Block]:
    """Yield margins and calibration."""
    yield draw_margins(outcomes(run.rows).margins)
    found = calibration(run.rows)
    yield draw_reliability(found)
    rows = [
        [
            Cell(f"{part['low']:.2f} to {part['high']:.2f}", part["low"]),
            Cell(f"{part['n']:,}", part["n"]),
            figure_cell(part["confidence"]),
            figure_cell(part["right"]),
            figure_cell(part["right"] - part["confidence"], form="{:+.3f}"),
        ]
        for part in found["bins"]
    ]
    heads = ("confidence", "comparisons", "mean confidence", "share right", "difference")
    title = f"Calibration: expected calibration error {found['ece']:.3f}"
    yield PageTable(title, heads, rows, note=f"{CALIBRATION_DEFINITION}.")


def length_blocks(run: FinishedRun, texts: Texts) -> Iterator[Block]:
    """Yield how the scores go with the lengths of the responses."""
    if not texts.by_id:
        yield Paragraph(f"Not shown: {texts.missing}.", True)
        return
    lengths = [[len(text) for text in texts.by_id[row.id].responses] for row in run.rows]
    found = length_bias(run.rows, lengths)
    rows = [
        [Cell("the preferred response is the longest one"), figure_cell(found["preferred_is_longest"])],
        [Cell("the longest response has the best score"), figure_cell(found["picks_longest"])],
        [
            Cell(f"accuracy where the preferred response is the longest ({found['n_longest']:,})"),
            figure_cell(found["accuracy_longest"]),
        ],
        [
            Cell(f"accuracy where it is not ({found['n_shorter']:,})"),
            figure_cell(found["accuracy_shorter"]),
        ],
    ]
    note = f"{found['equal']:,} comparisons have no single longest response. Definition: {LENGTH_DEFINITION}."
    yield PageTable("Length bias", ("", "share"), rows, note=note)


def posts_blocks(run: FinishedRun, texts: Texts) -> Iterator[Block]:
    """Yield the accuracy by the number of posts that the model saw."""
    if not texts.by_id:
        yield Paragraph(f"Not shown: {texts.missing}.", True)
        return
    seen = [posts_seen(run, row, len(texts.by_id[row.id].profile)) for row in run.rows]
    if len(set(seen)) < 2:
        yield Paragraph(f"Every comparison was scored with {seen[0]:,} posts.")
        return
    result, parts = outcomes(run.rows), _ranges(seen)
    points, rows = [], []
    for low, high in parts:
        index = [i for i, count in enumerate(seen) if low <= count <= high]
        share = float(result.wins[index].mean())
        bounds = accuracy_interval(result.wins[index], run.clusters.take(index)).bounds
        label = f"{low}" if low == high else f"{low}-{high}"
        points.append((label, share, bounds))
        rows.append([Cell(label, low), Cell(f"{len(index):,}", len(index)), figure_cell(share, bounds)])
    yield draw_points(
        "Accuracy by number of posts",
        points,
        xlabel="posts of the profile that the model saw",
        description="Each point holds the comparisons with so many posts; bars are 95 % intervals. Users with many "
        "posts are other users than those with few: this is no effect of posts.",
    )
    yield PageTable("Accuracy by number of posts", ("posts", "comparisons", "accuracy"), rows)


def _ranges(values: Sequence[int], *, most: int = 12) -> list[tuple[int, int]]:
    """Ranges that hold all values: a range for each value if there are few, else about equally many in each."""
    distinct = sorted(set(values))
    if len(distinct) <= most:
        return [(value, value) for value in distinct]
    edges = sorted({int(edge) for edge in np.quantile(values, np.linspace(0, 1, most + 1))})
    return [(low + (place > 0), high) for place, (low, high) in enumerate(pairwise(edges))]
