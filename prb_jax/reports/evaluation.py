"""The chapter of a page about one evaluation: its answer, users, subsets, pairs to read, and how the run was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import counted
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.calibration import CALIBRATION_DEFINITION, LENGTH_DEFINITION, calibration, length_bias
from prb_jax.metrics.coverage import chance
from prb_jax.metrics.uncertainty import accuracy_interval
from prb_jax.reports.drawings import draw_each_user, draw_margins, draw_points, draw_reliability, draw_users
from prb_jax.reports.forest import BASELINE, CONTROL, MODEL, Estimate, draw_forest
from prb_jax.reports.page import Block, Chapter, Listing, Paragraph, Preformatted, Section
from prb_jax.reports.pairs import Texts, pairs_to_read, posts_seen
from prb_jax.reports.summary import (
    HEADLINE,
    Summaries,
    about_figure,
    answer,
    gains,
    headline,
    scorers,
    served,
    undefined_baselines,
)
from prb_jax.reports.table import NONE, Cell, Getter, Table, field, interval, number, signed
from prb_jax.runs.finished import FinishedRun
from prb_jax.runs.users import user_lines
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.prompt_extras import told_of
from prb_jax.trees.tree import EQUAL_SIDES

_BASELINES = {
    "baseline:length": "prefers the longest response",
    "baseline:shorter": "prefers the shortest response",
    "baseline:random": "scores at random",
    "baseline:first": "prefers the first response",
    "baseline:profile-overlap": "prefers the response whose words are most like the user's profile",
    "baseline:popularity": "prefers the response that most other users prefer; equal votes are a tie",
    "baseline:nearest-users": "asks only the users who agreed most with this user; equal votes are a tie",
}
_MOST_DRAWN = 40  # maximum number of subsets in a picture
MOST_ROWS = 2000  # maximum rows of a table; larger pages are slow to open, and nobody reads them

_LONGEST_MANIFEST = 100_000


def model_name(record: Mapping[str, Any]) -> str:
    """Return the page's name for the model of a run; for a local folder, the last part of its path."""
    name, model = str(record.get("model")), record["inputs"].get("model") or {}
    if not isinstance(model.get("files"), dict) or model.get("revision") is not None:
        return name
    parts = Path(name).parts
    return "/".join(parts[-2:] if parts[-1:] == ("model",) else parts[-1:]) or name


def evaluation_chapter(run: FinishedRun, texts: Texts, *, name: str, title: str, room: int) -> Chapter:
    """Return the chapter of one run of `prb evaluate`; ``name`` is its anchor, ``room`` the maximum bytes for the texts
    of pairs."""
    graded, defined = run.rows[0].is_graded, run.summary.get("accuracy", 0) is not None
    people: dict[str, Iterable[Block]] = {}
    details: dict[str, Iterable[Block]] = {"Figures": _figures(run)}
    if not graded:
        people["Pairs to read"] = pairs_to_read(run, texts, room=room)
        if defined:
            without_texts = [Paragraph(f"Not shown: {texts.missing}.", True)]
            details |= {
                "Scores": _scores(run),
                "Length of responses": _lengths(run, texts) if texts.by_id else without_texts,
                "Posts of the profile": _posts(run, texts) if texts.by_id else without_texts,
            }
        details["Ties and cut text"] = _cut(run)
    parts = {
        **({} if graded else {"Benchmarks": _benchmarks(run)}),
        **({} if graded or not defined else {"By user": _users(run)}),
        "By subset": _subsets(run),
        **people,
        **details,
        "How it was made": _made(run),
    }
    sections = (Section(heading, list(blocks)) for heading, blocks in parts.items())
    kept = [section for section in sections if section.blocks]
    return Chapter(title, name, _answer(run), list(_opening(run)), kept)


def _answer(run: FinishedRun) -> str:
    model, summary = model_name(run.record), run.summary
    if run.rows[0].is_graded:
        share = interval(summary["accuracy"], summary.get("ci95"))
        return f"{model} has a mean grade of {share} in {summary['n']:,} samples."
    pairs = all(len(row.scores) == 2 for row in run.rows)
    return answer(summary, name=model, unit="pair" if pairs else "comparison")


def _opening(run: FinishedRun) -> Iterator[Block]:
    """Yield warnings, the picture of the answer, and its legend."""
    summary, model = run.summary, model_name(run.record)
    if summary.get("limit") is not None:
        yield Paragraph(f"Testing only: the first {summary['limit']} comparisons of each source.", True)
    if told := told_of(summary.get("hints") or {}):
        yield Paragraph(
            f"The model was told, in addition to the profile: {told}.", UPPER_BOUND in summary["hints"]
        )
    if estimates := estimates_of(summary, name=model):
        title = "The model, its controls and the baselines" if len(estimates) > 1 else "The model"
        yield draw_forest(title, estimates, reference=chance_of(run))
    yield Listing("How to read these figures", list(_legend(run)))


def estimates_of(summary: Mapping[str, Any], *, name: str) -> list[Estimate]:
    """Return the lines of a forest plot for a model, its controls and the baselines, as far as they are defined."""
    controls, lines = len(summary.get("controls") or {}), []
    for place, (one, figures) in enumerate(scorers(summary, name=name).items()):
        kind = MODEL if place == 0 else CONTROL if place <= controls else BASELINE
        about = about_figure(one, figures, of=summary["n"])
        if figures["accuracy"] is not None:
            label = one.removeprefix("baseline:").removeprefix(f"{name}, ")
            lines.append(Estimate(label, figures["accuracy"], figures.get("ci95"), kind, about))
    return lines


def chance_of(run: FinishedRun) -> tuple[str, float] | None:
    """Return the accuracy of random scores, with its name; None for graded rows."""
    if run.rows[0].is_graded:
        return None
    share = float(np.mean([chance(row.labels) for row in run.rows]))
    return f"chance {share:.3g}", share


def _legend(run: FinishedRun) -> Iterator[str]:
    """Yield the meaning of the figures of a run, and why some are missing."""
    summary, definitions = run.summary, run.summary.get("definitions") or {}
    yield f"95 % interval: {definitions.get('ci95', 'see summary.json')}."
    if not run.rows[0].is_graded:
        yield "Accuracy: the preferred response has the best score; a tie is not a win."
    for sentence in (*gains(summary.get("controls") or {}), served(summary)):
        if sentence:
            yield f"{sentence[0].upper()}{sentence[1:]}."
    baselines = [name for name in scorers(summary, name="") if name in _BASELINES]
    yield from (f"Baseline {name.removeprefix('baseline:')}: {_BASELINES[name]}." for name in baselines)
    yield from (f"Not shown: {reason}." for reason in undefined_baselines(summary))
    yield from _missing(scorers(summary, name=model_name(run.record)))


def _figures(run: FinishedRun) -> Iterator[Block]:
    """Yield tables of the figures of the model, its controls and the baselines."""
    summary, model = run.summary, model_name(run.record)
    shown = scorers(summary, name=model)
    yield headline(shown, title="The model, its controls and the baselines")
    differences = [
        (f"{model} minus {name}", signed(figures["difference"], figures.get("difference_ci95")))
        for name, figures in shown.items()
        if figures.get("difference") is not None and name != model
    ]
    if differences:
        heads = ("on the same comparisons", "difference")
        yield Table("Paired differences of accuracy", heads, differences)
    if isinstance(quantized := summary.get("quantization"), Mapping):
        note = (summary.get("definitions") or {}).get("quantization", "")
        yield Table("Weights in eight bits", ("", "figure"), list(_flat(quantized)), note=note)


def _missing(shown: Summaries) -> Iterator[str]:
    """Yield the distinct reasons why figures and intervals of some summaries are missing, with the names."""
    reasons: dict[str, dict[str, None]] = {}
    for name, summary in shown.items():
        for key in ("ci95", "user_accuracy_ci95", "coverage", "coverage_ci95", "difference_ci95"):
            if reason := summary.get(f"{key}_reason"):
                reasons.setdefault(str(reason), {})[name] = None
    for reason, names in reasons.items():
        yield f"Without some figures or intervals: {', '.join(names)}: {reason}."


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and cells of nested JSON objects."""
    for key, part in value.items():
        if isinstance(part, Mapping):
            yield from _flat(part, f"{prefix}{key}: ")
        else:
            yield f"{prefix}{key}".replace("_", " "), _cell(part)


def _cell(value: Any) -> str:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(end, int | float) for end in value):
        return f"[{value[0]:.3f}..{value[1]:.3f}]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value, "{:,}" if isinstance(value, int) else "{:.5g}")
    return NONE if value is None else str(value)


def _subsets(run: FinishedRun) -> Iterator[Block]:
    parts: Mapping[str, Any] = run.summary.get("by_subset") or {}
    if not parts:
        return
    columns = {"subset": field("name"), **{name: HEADLINE[name] for name in ("n", "accuracy", "ties")}}
    for name, figures in scorers(run.summary, name="").items():
        if not name.startswith("baseline:"):
            continue
        others = figures.get("by_subset") or {}
        columns[name.removeprefix("baseline:")] = lambda row, others=others: number(
            (others.get(row["name"]) or {}).get("accuracy")
        )
    estimates = [
        Estimate(name, part["accuracy"], part.get("ci95"), remark=counted(part["n"], "comparison"))
        for name, part in parts.items()
        if part["accuracy"] is not None
    ]
    if 1 < len(estimates) <= _MOST_DRAWN:
        yield draw_forest("Accuracy by subset", estimates, reference=chance_of(run))
    yield _bounded("Subsets", [{"name": name, **part} for name, part in parts.items()], columns)


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
    told = served(summary) or "nobody has enough comparisons to test whether the model serves them"
    yield Paragraph(f"{len(lines):,} {run.clusters.over}; {told}.")
    if known := summary.get("users_fitted_on"):
        meaning = definitions.get("users_fitted_on", "users that it was fitted on")
        yield Paragraph(f"{known:,}: {meaning}.", True)
    if lacking := summary.get("users_without_history"):
        yield Paragraph(
            f"Users of whom the history knows nothing: {lacking:,} of {summary['users']:,}.", True
        )
    if (unknown := summary.get("unknown_users")) is not None:
        yield Paragraph(f"Users that the model was not trained on: {json.dumps(unknown)}")
    columns = {
        "user": lambda line: line.user,
        "comparisons": lambda line: number(line.comparisons, "{:,}"),
        "accuracy": lambda line: interval(line.accuracy, line.ci95),
        "ties": lambda line: number(line.ties, "{:,}"),
    }
    yield _bounded("Users", sorted(lines, key=lambda line: (line.accuracy, line.user)), columns)


def _bounded(title: str, items: Iterable[Any], columns: Mapping[str, Getter]) -> Table:
    """Return a table of at most `MOST_ROWS` rows: the lowest and the highest accuracies, the third column."""
    table = Table.of(title, items, columns)
    rows, note = list(table.rows), ""
    if len(rows) > MOST_ROWS:
        rows.sort(key=lambda row: getattr(row[2], "value", 0))
        note = f"The {MOST_ROWS // 2:,} lowest and the {MOST_ROWS // 2:,} highest of {len(rows):,} rows."
        rows = rows[: MOST_ROWS // 2] + rows[-MOST_ROWS // 2 :]
    return Table(title, table.heads, rows, note=note, filtered=len(rows) > 20)


def _scores(run: FinishedRun) -> Iterator[Block]:
    """Margins and calibration."""
    yield draw_margins(outcomes(run.rows).margins)
    reliability = calibration(run.rows)
    yield draw_reliability(reliability)
    columns = {
        "confidence": lambda part: Cell(f"{part['low']:.2f} to {part['high']:.2f}", part["low"]),
        "comparisons": field("n", "{:,}"),
        "mean confidence": field("confidence", "{:.3f}"),
        "share right": field("right", "{:.3f}"),
        "difference": lambda part: number(part["right"] - part["confidence"], "{:+.3f}"),
    }
    title = f"Calibration: expected calibration error {reliability['ece']:.3f}, Brier score {reliability['brier']:.3f}"
    yield Table.of(title, reliability["bins"], columns, note=f"{CALIBRATION_DEFINITION}.")


def _lengths(run: FinishedRun, texts: Texts) -> Iterator[Block]:
    """Yield the relation between scores and the lengths of the responses."""
    lengths = [[len(text) for text in texts.by_id[row.id].responses] for row in run.rows]
    bias = length_bias(run.rows, lengths)
    shares = {
        "the preferred response is the longest one": "preferred_is_longest",
        "the longest response has the best score": "picks_longest",
        f"accuracy if the preferred response is the longest ({bias['n_longest']:,})": "accuracy_longest",
        f"accuracy if it is not ({bias['n_shorter']:,})": "accuracy_shorter",
    }
    rows = [(name, number(bias[key])) for name, key in shares.items()]
    note = f"{bias['equal']:,} comparisons have no single longest response. Definition: {LENGTH_DEFINITION}."
    yield Table("Length bias", ("", "share"), rows, note=note)


def _posts(run: FinishedRun, texts: Texts) -> Iterator[Block]:
    """Yield the accuracy by the number of posts that the model saw."""
    seen = [posts_seen(run, row, len(texts.by_id[row.id].profile)) for row in run.rows]
    if len(set(seen)) < 2:
        yield Paragraph(f"Every comparison was scored with {counted(seen[0], 'post')}.")
        return
    wins, points, rows = outcomes(run.rows).wins, [], []
    for low, high in _ranges(seen):
        index = [i for i, count in enumerate(seen) if low <= count <= high]
        share = float(wins[index].mean())
        bounds = accuracy_interval(wins[index], run.clusters.take(index)).bounds
        label = f"{low}" if low == high else f"{low}-{high}"
        points.append((label, share, bounds))
        rows.append((Cell(label, low), number(len(index), "{:,}"), interval(share, bounds)))
    yield draw_points(
        "Accuracy by number of posts",
        points,
        xlabel="posts of the profile that the model saw",
        description="Each point has the comparisons with this number of posts; bars are 95 % intervals. Users with "
        "many posts differ from users with few, so this is not the effect of posts.",
    )
    yield Table("Accuracy by number of posts", ("posts", "comparisons", "accuracy"), rows)


def _ranges(values: Sequence[int], *, most: int = 12) -> list[tuple[int, int]]:
    """Return ranges that cover all values: one for each value if there are few, else about equally many in each."""
    distinct = sorted(set(values))
    if len(distinct) <= most:
        return [(value, value) for value in distinct]
    edges = sorted({int(edge) for edge in np.quantile(values, np.linspace(0, 1, most + 1))})
    return [(low + (place > 0), high) for place, (low, high) in enumerate(pairwise(edges))]


def _cut(run: FinishedRun) -> Iterator[Block]:
    n, summary = len(run.rows), run.summary
    ties, cut = summary.get("ties") or 0, summary.get("truncated", 0)
    rows = [
        ("ties", Cell(f"{ties:,} of {n:,}", ties)),
        ("comparisons with cut text", Cell(f"{cut:,} of {n:,}", cut)),
    ]
    amounts = {kind.replace("_", " "): amount for kind, amount in (summary.get("truncation") or {}).items()}
    if isinstance(left_out := summary.get("left_out"), Mapping):
        amounts["comparisons too long, and left out"] = left_out.get("comparisons", 0)
    if isinstance(equal := summary.get(EQUAL_SIDES), Mapping):
        amounts["comparisons with the same tokens on both sides"] = equal.get("comparisons", 0)
    rows += [(name, number(amount, "{:,}")) for name, amount in amounts.items()]
    yield Table("Ties and cut text", ("", "amount"), rows)


def _benchmarks(run: FinishedRun) -> Iterator[Block]:
    for name, result in (run.summary.get("benchmarks") or {}).items():
        shown = {model_name(run.record): result, **(result.get("baselines") or {})}
        parts = [{"score": part.get("score"), **(part.get("figures") or {})} for part in shown.values()]
        rows = [
            (figure, *(number(part.get(figure), "{:.4f}") for part in parts))
            for figure in dict.fromkeys(figure for part in parts for figure in part)
        ]
        yield Table(name, ("", *shown), rows, note=str(result.get("rule", "")))


def _made(run: FinishedRun) -> Iterator[Block]:
    if not run.record.get("command") and not run.rows[0].is_graded:
        yield Paragraph("The run was made by a call from Python; no command line is recorded.", True)
    yield from how_made(run.record, "run.json")
    if isinstance(definitions := run.summary.get("definitions"), Mapping):
        rows = [(str(key), str(value)) for key, value in definitions.items()]
        yield Table("Definitions", ("figure", "meaning"), rows, words=2)


def how_made(record: Mapping[str, Any], file: str) -> Iterator[Block]:
    """Yield the command of a run, if recorded, and the facts in its file."""
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
