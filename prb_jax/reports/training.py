"""The chapters of a page about runs in training: of `prb train` and of `prb ppo`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_object
from prb_jax.errors import RunError
from prb_jax.reports.blocks import (
    Block,
    Cell,
    Chapter,
    PageTable,
    Paragraph,
    Preformatted,
    Section,
    figure_cell,
    last_figures,
)
from prb_jax.reports.drawings import draw_curves
from prb_jax.reports.evaluation import how_made
from prb_jax.runs.kind import SUMMARY

_SHOWN = 4
"""Rollouts of the first and of the last step with any that are shown."""


def training_chapter(folder: Path, run_name: str, anchor: str) -> Chapter:
    """Return the chapter of a training run, finished or not: curves, last figures; of a policy rollouts to read.

    Raises:
      RunError: a file of the run cannot be read.
    """
    from prb_jax.rl.record import is_ppo_run, panels_of, read_ppo_run
    from prb_jax.rl.rollouts import ROLLOUTS
    from prb_jax.training.folder import TRAIN, read_summary, read_training
    from prb_jax.training.logs import METRICS, read_metrics, read_steps

    is_policy, finished = is_ppo_run(folder), (folder / SUMMARY).is_file()
    record = read_ppo_run(folder) if is_policy else read_training(folder)
    assert record is not None
    rows = read_metrics(folder / METRICS)
    blocks: list[Block] = []
    if not finished:
        blocks.append(Paragraph("The training run is not finished: the curves end where it stands.", True))
    panels = panels_of(rows) if is_policy else None
    blocks.append(draw_curves(rows, panels=panels) if rows else Paragraph("No step is recorded yet.", True))
    sections = [Section("Learning curves", blocks)]
    if is_policy and finished:
        summary = read_object(folder / SUMMARY, error=RunError)
        if summary.get("ended_by_watch"):
            blocks.append(Paragraph(f"The watch ended the run: {summary['ended_by_watch']}.", True))
        blocks.append(_policy_figures(summary))
    elif finished:
        blocks.append(last_figures(read_summary(folder)))
    if is_policy and (kept := read_steps(folder / ROLLOUTS)):
        sections.append(Section("Rollouts to read", _rollouts(kept)))
    sections.append(Section("How it was made", list(how_made(record, TRAIN))))
    return Chapter(f"{run_name}: {'a policy in training' if is_policy else 'training'}", anchor, sections)


def _policy_figures(summary: dict[str, Any]) -> PageTable:
    first, last, definitions = (summary.get(key) or {} for key in ("first", "last_tenth", "definitions"))
    rows = [
        [
            Cell(name.replace("_", " ")),
            figure_cell(first.get(name), form="{:.4g}"),
            figure_cell(last.get(name), form="{:.4g}"),
            Cell(definitions.get(name, "")),
        ]
        for name in first
    ]
    note = f"{summary.get('steps'):,} steps of {summary.get('algorithm')}; reward: {summary.get('reward') or 'none'}."
    return PageTable("First and last figures", ("", "first step", "last tenth", "meaning"), rows, note=note)


def _rollouts(kept: Sequence[dict[str, Any]]) -> list[Block]:
    """The first and the last rollouts that were kept."""
    found: list[Block] = []
    for step in sorted({kept[0]["step"], kept[-1]["step"]}):
        for row in [row for row in kept if row["step"] == step][:_SHOWN]:
            scores = f"reward {row['reward']:.4g}, KL {row['kl']:.4g}"
            about = f"step {step}, {row['id']}, rollout {row['rollout']}: {scores}"
            found.append(Preformatted(about, row["text"]))
    return found
