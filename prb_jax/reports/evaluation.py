"""The chapter of a page about one evaluation: figures, who is served, what scores are worth, how it was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import counted
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.calibration import CALIBRATION_DEFINITION, calibration
from prb_jax.metrics.length import LENGTH_DEFINITION, length_bias
from prb_jax.metrics.uncertainty import accuracy_interval
from prb_jax.reports.blocks import (
    Block,
    Cell,
    Chapter,
    PageTable,
    Paragraph,
    Preformatted,
    Section,
    any_cell,
    figure_cell,
    headline,
    missing,
    scorers,
)
from prb_jax.reports.drawings import draw_each_user, draw_margins, draw_points, draw_reliability, draw_users
from prb_jax.reports.pairs import Texts, pairs_to_read, posts_seen
from prb_jax.reports.style import NONE, signed
from prb_jax.reports.tables import gains
from prb_jax.runs.finished import FinishedRun
from prb_jax.runs.users import user_lines
from prb_jax.scoring.prompt_extras import UPPER_BOUND, told_of


def model_name(record: Mapping[str, Any]) -> str:
    """Return what a page calls the model of a run: a local folder by the last part of its path."""
    name, model = str(record.get("model")), record["inputs"].get("model") or {}
    if not isinstance(model.get("files"), dict) or model.get("revision") is not None:
        return name
    parts = Path(name).parts
    return "/".join(parts[-2:] if parts[-1:] == ("model",) else parts[-1:]) or name


MOST_ROWS = 2000

"""Of a table; more would make a page that nobody reads and few browsers open at once."""

_LONGEST_MANIFEST = 100_000


def evaluation_chapter(run: FinishedRun, texts: Texts, *, name: str, title: str, room: int) -> Chapter:
    """Return the chapter of one run.

    Args:
      run: of `prb evaluate`.
      texts: of its comparisons.
      name: of the chapter in addresses.
      title: of the chapter.
      room: bytes that the texts of pairs may take.
    """
    result, by_subset = Section("Result", list(_result(run))), Section("By subset", list(_subsets(run)))
    if run.rows[0].is_graded:
        made = Section("How it was made", list(_made(run)))
        return Chapter(title, name, [section for section in (result, by_subset, made) if section.blocks])
    sections = (
        result,
        by_subset,
        Section("By user", list(_users(run))),
        Section("Scores", list(score_blocks(run))),
        Section("Length of responses", list(length_blocks(run, texts))),
        Section("Posts of the profile", list(posts_blocks(run, texts))),
        Section("Ties and cut text", list(_cut(run))),
        Section("Benchmarks", list(_benchmarks(run))),
        Section("Pairs to read", list(pairs_to_read(run, texts, room=room))),
        Section("How it was made", list(_made(run))),
    )
    return Chapter(title, name, [section for section in sections if section.blocks])


def _result(run: FinishedRun) -> Iterator[Block]:
    summary = run.summary
    definitions = summary.get("definitions") or {}
    model = model_name(run.record)
    if summary.get("limit") is not None:
        yield Paragraph(f"Testing only: the first {summary['limit']} comparisons of each source.", True)
    note = f"[..] 95 % interval: {definitions.get('ci95', 'see summary.json')}. A tie is not a win."
    if told := told_of(summary.get("hints") or {}):
        yield Paragraph(f"The model was told beside the profile: {told}.", UPPER_BOUND in summary["hints"])
    shown = scorers(summary, name=model)
    yield headline(shown, title="The model, its controls and the baselines", note=note)
    yield from (Paragraph(reason, True) for reason in missing(shown))
    for gain in gains(summary.get("controls") or {}):
        yield Paragraph(f"{gain[0].upper()}{gain[1:]}.")
    differences = [
        [
            Cell(f"{model} minus {name}"),
            Cell(signed(figures["difference"], figures.get("difference_ci95")), figures["difference"]),
        ]
        for name, figures in shown.items()
        if figures.get("difference") is not None and name != model
    ]
    if differences:
        yield PageTable(
            "Paired differences of accuracy", ("on the same comparisons", "difference"), differences
        )
    if isinstance(quantized := summary.get("quantization"), Mapping):
        rows = [[Cell(key), any_cell(value)] for key, value in _flat(quantized)]
        yield PageTable(
            "Weights in eight bits", ("", "figure"), rows, note=definitions.get("quantization", "")
        )


def _subsets(run: FinishedRun) -> Iterator[Block]:
    parts: Mapping[str, Any] = run.summary.get("by_subset") or {}
    if not parts:
        return
    others = {
        name: figures.get("by_subset") or {} for name, figures in (run.summary.get("baselines") or {}).items()
    }
    rows = [
        [
            Cell(subset),
            figure_cell(part.get("n"), form="{:,}"),
            figure_cell(part.get("accuracy"), part.get("ci95")),
            figure_cell(part.get("ties"), form="{:,}"),
            *(figure_cell((other.get(subset) or {}).get("accuracy")) for other in others.values()),
        ]
        for subset, part in parts.items()
    ]
    heads = ("subset", "n", "accuracy", "ties", *(name.removeprefix("baseline:") for name in others))
    yield _bounded("Accuracy by subset", heads, rows, place=2)


def _users(run: FinishedRun) -> Iterator[Block]:
    lines = user_lines(run.rows, run.clusters)
    if not lines:
        yield Paragraph("No comparison names its user.", True)
        return
    summary, definitions = run.summary, run.summary.get("definitions") or {}
    chances = {1 / len(row.scores) for row in run.rows}
    accuracy = np.array([line.accuracy for line in lines])
    yield draw_users(accuracy, chance=chances.pop() if len(chances) == 1 else None)
    yield draw_each_user(lines)
    coverage = summary.get("coverage")
    shown = NONE if coverage is None else f"{coverage:.3f}"
    yield Paragraph(
        f"{len(lines):,} {run.clusters.over}; {summary.get('users_testable', NONE)} with enough comparisons to be "
        "tested. "
        f"Coverage {shown}: {definitions.get('coverage', 'see summary.json')}. "
        f"{_rate(summary, 'coverage_benjamini_hochberg')} after correction for the number of users "
        f"(Benjamini-Hochberg); {_rate(summary, 'coverage_by_chance')} would be covered by chance."
    )
    if summary.get("users_fitted_on"):
        known = f"{summary['users_fitted_on']:,}"
        yield Paragraph(
            f"{known}: {definitions.get('users_fitted_on', 'users that it was fitted on')}.", True
        )
    unknown = summary.get("unknown_users")
    if unknown is not None:
        yield Paragraph(f"Users that the model was not trained on: {json.dumps(unknown)}")
    cells = [
        [
            Cell(line.user),
            Cell(f"{line.comparisons:,}", line.comparisons),
            figure_cell(line.accuracy, line.ci95),
            Cell(f"{line.ties:,}", line.ties),
        ]
        for line in lines
    ]
    cells.sort(key=lambda row: (row[2].value or 0, row[0].text))
    yield _bounded("Users", ("user", "comparisons", "accuracy", "ties"), cells, place=2)


def _rate(summary: Mapping[str, Any], key: str) -> str:
    value = summary.get(key)
    return NONE if value is None else f"{value:.3f}"


def _bounded(title: str, heads: Sequence[str], rows: list[list[Cell]], *, place: int) -> PageTable:
    """A table of at most `MOST_ROWS`: those with the lowest and the highest figure in the column `place`."""
    note = ""
    if len(rows) > MOST_ROWS:
        rows = sorted(rows, key=lambda row: row[place].value or 0)
        note = f"The {MOST_ROWS // 2:,} lowest and the {MOST_ROWS // 2:,} highest of {len(rows):,} rows."
        rows = rows[: MOST_ROWS // 2] + rows[-MOST_ROWS // 2 :]
    return PageTable(title, heads, rows, note=note, filtered=len(rows) > 20)


def _cut(run: FinishedRun) -> Iterator[Block]:
    n, summary = len(run.rows), run.summary
    rows = [
        [Cell("ties"), Cell(f"{summary.get('ties') or 0:,} of {n:,}", summary.get("ties") or 0)],
        [
            Cell("comparisons with cut text"),
            Cell(f"{summary.get('truncated', 0):,} of {n:,}", summary.get("truncated", 0)),
        ],
    ]
    for kind, amount in (summary.get("truncation") or {}).items():
        rows.append([Cell(kind.replace("_", " ")), Cell(f"{amount:,}", amount)])
    left_out = summary.get("left_out")
    if isinstance(left_out, Mapping):
        count = left_out.get("comparisons", 0)
        rows.append([Cell("comparisons too long, and left out"), Cell(f"{count:,}", count)])
    yield PageTable("Ties and cut text", ("", "amount"), rows)


def _benchmarks(run: FinishedRun) -> Iterator[Block]:
    for name, result in (run.summary.get("benchmarks") or {}).items():
        shown = {model_name(run.record): result, **(result.get("baselines") or {})}
        figures = dict.fromkeys(key for part in shown.values() for key in part.get("figures") or {})
        rows = [[Cell("score"), *(figure_cell(part.get("score"), form="{:.4f}") for part in shown.values())]]
        for figure in figures:
            cells = [
                figure_cell((part.get("figures") or {}).get(figure), form="{:.4f}") for part in shown.values()
            ]
            rows.append([Cell(figure), *cells])
        yield PageTable(name, ("", *shown), rows, note=str(result.get("rule", "")))


def _made(run: FinishedRun) -> Iterator[Block]:
    if not run.record.get("command") and not run.rows[0].is_graded:
        yield Paragraph("The run was made by a call from Python; no command line is recorded.", True)
    yield from how_made(run.record, "run.json")
    definitions = run.summary.get("definitions")
    if isinstance(definitions, Mapping):
        rows = [[Cell(str(key)), Cell(str(value))] for key, value in definitions.items()]
        yield PageTable("Definitions", ("figure", "meaning"), rows, words=2)


def how_made(record: Mapping[str, Any], file: str) -> Iterator[Block]:
    """Yield the command of a run, where one is recorded, and what its file says of it."""
    command = record.get("command")
    if isinstance(command, list) and command:
        yield Preformatted("The command that repeats it", shlex.join(map(str, command)))
    text = json.dumps(record, indent=2)
    if len(text) > _LONGEST_MANIFEST:
        yield Paragraph(
            f"The first {_LONGEST_MANIFEST:,} of the {len(text):,} characters of {file}; the folder has them all.",
            True,
        )
    yield Preformatted(f"Manifest: {file}", text[:_LONGEST_MANIFEST], folded=True)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        if isinstance(part, Mapping):
            yield from _flat(part, f"{prefix}{key}: ")
        else:
            yield f"{prefix}{key}".replace("_", " "), part


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
        yield Paragraph(f"Every comparison was scored with {counted(seen[0], 'post')}.")
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
