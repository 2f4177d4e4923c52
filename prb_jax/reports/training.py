"""Training runs of `prb train` and `prb ppo`: their last figures as a table, and their chapters of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prb_jax.errors import counted
from prb_jax.reports.drawings import drawing
from prb_jax.reports.evaluation import how_made
from prb_jax.reports.page import Block, Chapter, Paragraph, Preformatted, Section
from prb_jax.reports.table import Table, field, percent
from prb_jax.runs.training import METRICS, POLICY_RUN, ROLLOUTS, TRAIN, read_training

_LAST = {name: field(name, "{:.4f}") for name in ("loss", "accuracy", "margin")}
_SHOWN = 4  # number of rollouts to show for the first and the last recorded step


def training_table(summary: Mapping[str, Any], *, title: str) -> Table:
    """Return a row of figures for training and one for validation, with a note on what was trained, from the
    `summary.json` of a run of `prb train`."""
    note = (
        f"{summary['steps']:,} steps, {summary['pairs_seen']:,} comparisons and {summary['tokens_seen']:,} tokens "
        f"seen, {summary['trained_parameters']:,} of {summary['parameters']:,} parameters trained; the model of step "
        f"{summary['exported_step']:,} was exported"
    )
    columns = {"": field("name"), "comparisons": field("comparisons", "{:,}"), **_LAST}
    return Table.of(title, _parts(summary), columns, note=note)


def last_figures(summary: Mapping[str, Any]) -> Table:
    """Return the table of the last figures of a finished training run."""
    note = f"{summary.get('steps'):,} steps; the model of step {summary.get('exported_step'):,} was exported."
    return Table.of("Last figures", _parts(summary), {"": field("name"), **_LAST}, note=note)


def _parts(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = {
        "training, last tenth": ("last_tenth", "train_comparisons"),
        "validation of the exported model": ("validation", "validation_comparisons"),
    }
    return [
        {"name": name, "comparisons": summary.get(count), **summary[key]}
        for name, (key, count) in parts.items()
        if isinstance(summary.get(key), dict)
    ]


def training_chapter(folder: Path, run_name: str, anchor: str) -> Chapter:
    """Return the chapter of a training run, finished or not: curves, last figures; for a policy also rollouts.

    Raises:
      RunError: a file of the run cannot be read.
    """
    from prb_jax.training.curves import curves_figure, panels_of
    from prb_jax.training.logs import read_metrics, read_steps

    run = read_training(folder)
    is_policy, summary = run.kind is POLICY_RUN, run.summary
    rows = read_metrics(folder / METRICS)
    opening: list[Block] = []
    if rows:
        panels = panels_of(rows)
        labels = list(panels.values())
        named = labels[:1] + [label if label[:2].isupper() else label.lower() for label in labels[1:]]
        steps = max(row["step"] for row in rows)
        description = (
            f"{', '.join(named[:-1])} and {named[-1]} over {steps:,} steps: for training (thin: each step; thick: "
            "running mean) and validation, if any."
        )
        curves = {
            label: partial(curves_figure, rows, size=(3.2, 3), panel=name) for name, label in panels.items()
        }
        opening.append(drawing(curves, "Learning curves", description))
    sections = []
    if summary is None:
        answer = (
            f"The training run is not finished: {counted(len(rows), 'row')} of metrics are recorded so far."
        )
    else:
        answer = _policy_answer(summary) if is_policy else _training_answer(summary)
        if summary.get("ended_by_watch"):
            opening.append(Paragraph(f"The watch ended the run: {summary['ended_by_watch']}.", True))
        figures = _policy_figures(summary) if is_policy else last_figures(summary)
        sections.append(Section("Figures", [figures]))
    if is_policy and (kept := read_steps(folder / ROLLOUTS)):
        sections.insert(0, Section("Rollouts to read", _rollouts(kept)))
    sections.append(Section("How it was made", list(how_made(run.record, TRAIN))))
    heading = f"{run_name}: {'a policy in training' if is_policy else 'training'}"
    return Chapter(heading, anchor, answer, opening, sections)


def _training_answer(summary: Mapping[str, Any]) -> str:
    """Return how often a trained reward model is right, in one sentence."""
    steps, train, held_out = summary["steps"], summary["last_tenth"]["accuracy"], summary.get("validation")
    seen = f"{percent(train, None)} of the last tenth of its training"
    if held_out is None:
        held = f"in {seen}; no comparisons were held out"
    else:
        share = percent(held_out["accuracy"], None)
        held = f"in {share} of {summary['validation_comparisons']:,} comparisons that were held out, and in {seen}"
    end = (
        ""
        if summary["exported_step"] == steps
        else f"; the model of step {summary['exported_step']:,} was exported"
    )
    return f"After {counted(steps, 'step')} the model prefers the chosen response {held}{end}."


def _policy_answer(summary: Mapping[str, Any]) -> str:
    """Return how far training moved a policy, in one sentence."""
    first, last = summary["first"], summary["last_tenth"]
    moved = [
        f"{name.replace('_', ' ')} goes from {first[name]:.3g} to {last[name]:.3g}"
        for name in ("reward", "gold", "loss")
        if name in first and name in last
    ]
    if "reward" in first:
        moved = moved[:2] if "gold" in first else moved[:1]
    kl = f", at a KL of {last['kl']:.3g} from the start" if "kl" in last else ""
    told = " and the ".join(moved) or "figures are below"
    return f"In {counted(summary['steps'], 'step')} of {summary['algorithm']} the {told}{kl}."


def _policy_figures(summary: Mapping[str, Any]) -> Table:
    first, last, definitions = (summary.get(key) or {} for key in ("first", "last_tenth", "definitions"))
    columns = {
        "": lambda name: name.replace("_", " "),
        "first step": lambda name: field(name, "{:.4g}")(first),
        "last tenth": lambda name: field(name, "{:.4g}")(last),
        "meaning": lambda name: definitions.get(name, ""),
    }
    note = f"{summary.get('steps'):,} steps of {summary.get('algorithm')}; reward: {summary.get('reward') or 'none'}."
    return Table.of("First and last figures", first, columns, note=note)


def _rollouts(kept: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return the first and the last recorded rollouts."""
    blocks: list[Block] = []
    for step in sorted({kept[0]["step"], kept[-1]["step"]}):
        for row in [row for row in kept if row["step"] == step][:_SHOWN]:
            scores = f"reward {row['reward']:.4g}, KL {row['kl']:.4g}"
            about = f"step {step}, {row['id']}, rollout {row['rollout']}: {scores}"
            blocks.append(Preformatted(about, row["text"]))
    return blocks
