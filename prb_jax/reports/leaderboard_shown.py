"""A leaderboard on the terminal, as a page, and in the formats of papers and other leaderboards."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from prb_jax.errors import RunError, counted, listed, quote
from prb_jax.records.benchmarks.benchmark import organisation_and_name
from prb_jax.reports.forest import BASELINE, CONTROL, MODEL, Estimate, draw_forest
from prb_jax.reports.page import Block, Chapter, Listing, Section
from prb_jax.reports.summary import MANY_TIES
from prb_jax.reports.table import (
    NONE,
    Getter,
    Table,
    bounded,
    change,
    field,
    gained,
    number,
    percent,
)

if TYPE_CHECKING:
    from rich.console import Group

Entries = Sequence[Mapping[str, Any]]
"""Runs as `prb_jax.leaderboard` returns them."""

_MOST_DRAWN: Final = 30  # maximum number of runs in a picture
_MOST_SIDE_BY_SIDE: Final = 8  # maximum number of runs whose subsets are in one table
_MOST_NAMED: Final = 3  # maximum number of data sets in a sentence
_LONGEST_NAME: Final = 60  # letters of a data set in a sentence
_LEGEND: Final = (
    "Accuracy: share of comparisons in which the preferred response has the best score. A tie is not a win.",
    "Half credit: accuracy if each tie counts as half a win. It decides the order of the runs.",
    "Per user: mean of the users' accuracies, so each user counts the same.",
    "Coverage: share of the users for whom the model is right more often than by chance.",
    "Gain: accuracy minus the accuracy of the same model without the user's profile.",
    "95 % interval: contains the true value in 95 of 100 repetitions, over other users from the same population.",
    "Two runs with overlapping intervals may still differ. The command prb compare tests their difference.",
)


def leaderboard_chapters(entries: Entries) -> list[Chapter]:
    """Return the chapters of a page: one for each data set, after one about all if there are several."""
    by_data = _by_data(entries)
    chapters = [
        _chapter(data, runs, f"data-{place}") for place, (data, runs) in enumerate(by_data.items(), 1)
    ]
    if len(chapters) == 1:
        return chapters
    best = {data: runs[0] for data, runs in by_data.items()}
    columns: dict[str, Getter] = {
        "data": field("data"),
        "run": field("run"),
        "runs": lambda entry: number(len(by_data[entry["data"]]), "{}"),
        "accuracy": bounded("accuracy", "ci95"),
        "gain": change("gain"),
    }
    found = [f"{run['run']} on {_short(data)} ({_percent(run)})" for data, run in best.items()]
    answer = f"The best of {len(entries)} runs on {len(best)} data sets: {listed(found, most=_MOST_NAMED)}."
    table = Table.of("The best run of each data set", best.values(), columns, words=2)
    return [Chapter("All data", "all", answer, [], [Section("Best runs", [table])]), *chapters]


def _by_data(entries: Entries) -> dict[str, list[Mapping[str, Any]]]:
    """Return the runs of each data set, in the given order."""
    by_data: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_data.setdefault(entry["data"], []).append(entry)
    return by_data


def _chapter(data: str, runs: Entries, name: str) -> Chapter:
    """Return the chapter of one data set, the best run first."""
    opening: list[Block] = []
    drawn = [run for run in runs if run["accuracy"] is not None][:_MOST_DRAWN]
    if drawn:
        rest = f"The best {_MOST_DRAWN} of {len(runs)} runs. " if len(drawn) < len(runs) else ""
        chance = runs[0]["chance"]
        opening.append(
            draw_forest(
                f"{counted(len(runs), 'run')} on {counted(runs[0]['scored'], 'comparison')}",
                [_estimate(run) for run in drawn],
                reference=None if chance is None else (f"chance {chance:.3g}", chance),
                what="a run",
                description=f"{rest}From the best to the worst, where a tie counts as half a win.",
            )
        )
    opening.append(Listing("How to read these figures", _LEGEND))
    names = ("run", "model", "view", "n", "accuracy", "per user", "coverage", "gain")
    blocks: list[Block] = [Table.of("All runs", runs, _columns(runs, names), words=3)]
    if benchmarks := dict.fromkeys(name for run in runs for name in run["benchmarks"]):
        scores: dict[str, Getter] = {"run": field("run")}
        for one in benchmarks:
            scores[one] = lambda run, one=one: number(run["benchmarks"].get(one), "{:.4f}")
        note = "Each benchmark has its own rule for its score."
        blocks.append(Table.of("Scores of benchmarks", runs, scores, note=note))
    subsets = sorted({subset for run in runs for subset in run["accuracy_by_subset"]})
    if len(subsets) > 1:
        side_by_side = runs[:_MOST_SIDE_BY_SIDE]
        parts: dict[str, Getter] = {"subset": str}
        for run in side_by_side:
            parts[run["run"]] = lambda subset, run=run: number(run["accuracy_by_subset"].get(subset))
        note = f"The best {len(side_by_side)} runs." if len(side_by_side) < len(runs) else ""
        blocks.append(Table.of("Accuracy by subset", subsets, parts, note=note))
    return Chapter(_short(data), name, _answer(data, runs), opening, [Section("Figures", blocks)])


def _answer(data: str, runs: Entries) -> str:
    """Return the best run, its accuracy and the run behind it in one sentence."""
    first, others = runs[0], [run for run in runs[1:] if run["accuracy"] is not None]
    if first["accuracy"] is None:
        return f"No run on {data} has an accuracy yet."
    best = "what the user wants" if first["user_accuracy"] is not None else "the better response"
    told = f"prefers {best} in {_percent(first)} of {counted(first['scored'], 'comparison')}"
    alone = f"{first['run']} {told} on {_short(data)}"
    parts = [
        f"{first['run']} is the best of {len(runs)} runs on {_short(data)}: it {told}" if runs[1:] else alone
    ]
    if first["gain"] is not None:
        parts.append(f"the profile is worth {gained(first['gain'], first['gain_ci95'])}")
    if others:
        parts.append(f"next is {others[0]['run']} with {_percent(others[0])}")
    return f"{'; '.join(parts)}."


def _percent(run: Mapping[str, Any]) -> str:
    return "no accuracy yet" if run["accuracy"] is None else percent(run["accuracy"], run["ci95"])


def _short(data: str) -> str:
    """Return the name of data for a sentence or a heading: if it is long, its first sources, or the end of a path."""
    if data.startswith("sha256:"):
        return f"data without a name ({data[:15]}...)"
    if len(data.split(" ")[0]) > _LONGEST_NAME - 4:
        return f"...{data[3 - _LONGEST_NAME :]}"
    return textwrap.shorten(data, _LONGEST_NAME, placeholder=" ...", break_on_hyphens=False)


def _estimate(run: Mapping[str, Any]) -> Estimate:
    """Return the line of a run in the picture."""
    baseline = run["model"].startswith("baseline:")
    remarks = [] if baseline else [run["model"], view_of(run)]
    if (run["ties"] or 0) > MANY_TIES * run["scored"] and run["half_credit_accuracy"] is not None:
        remarks.append(
            f"{run['half_credit_accuracy']:.3f} if each of {counted(run['ties'], 'tie')} counts half"
        )
    if run["gain"] is not None:
        remarks.append(f"the profile is worth {gained(run['gain'], None)}")
    kind = BASELINE if baseline else CONTROL if run["control"] else MODEL
    return Estimate(run["run"], run["accuracy"], run["ci95"], kind, "; ".join(remarks))


def view_of(entry: Mapping[str, Any]) -> str:
    """Return what a model was shown, e.g. "default, 10 posts"."""
    view = f"{entry['protocol']}, {counted(entry['profile_posts'], 'post')}"
    return f"{view}, {entry['hints']}" if entry["hints"] else view


_COLUMNS: Final[Mapping[str, Getter]] = {
    "run": field("run"),
    "model": field("model"),
    "data": lambda entry: f"{entry['data']}, {view_of(entry)}",
    "view": view_of,
    "n": lambda entry: (
        f"{entry['scored']:,}" + ("" if entry["finished"] else f" of {entry['comparisons']:,}")
    ),
    "accuracy": bounded("accuracy", "ci95"),
    "per user": bounded("user_accuracy"),
    "coverage": field("coverage", "{:.3f}"),
    "gain": change("gain"),
}
_HALF_CREDIT: Final[Mapping[str, Getter]] = {"half credit": field("half_credit_accuracy", "{:.3f}")}
_TABLE: Final = ("run", "model", "data", "n", "accuracy", "per user", "coverage", "gain")
"""Columns of the formats for papers."""
_WORDS: Final = 3  # number of their text columns at the left


def _columns(entries: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Getter]:
    """Return these columns, and after the accuracy the one with half credit if any run has many ties."""
    columns: dict[str, Getter] = {}
    for name in names:
        columns[name] = _COLUMNS[name]
        if name == "accuracy" and any((one["ties"] or 0) > MANY_TIES * one["scored"] for one in entries):
            columns |= _HALF_CREDIT
    return columns


def render_leaderboard(entries: Sequence[Mapping[str, Any]]) -> Group:
    """Return tables for the terminal, one for each data set; intervals are below their figures."""
    from rich.console import Group

    columns: dict[str, Getter] = {"run": lambda entry: f"{entry['run']}\n{entry['model']}, {view_of(entry)}"}
    for head, getter in _columns(entries, ("n", "accuracy", "coverage", "gain")).items():
        columns[head] = lambda entry, getter=getter: getter(entry).replace(" [", "\n[")
    note = "[..] 95 % interval; gain: of knowing the user, against no profile"
    by_data = _by_data(entries)
    last = entries[-1]["data"]
    return Group(
        *(
            Table.of(data, of_data, columns, whole=True, narrow=True, note=note if data == last else "")
            for data, of_data in by_data.items()
        )
    )


def as_markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = Table.of("", entries, _columns(entries, _TABLE), words=_WORDS).markdown(
        lambda text: text.replace("|", r"\|")
    )
    return "".join(f"{line}\n" for line in lines)


def as_latex(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in LaTeX, with the rules of the package booktabs."""
    shown = _columns(entries, _TABLE)
    cells = Table.of("", entries, shown).rows
    head, *rows = (" & ".join(map(_latex, row)) + r" \\" for row in (shown, *cells))
    columns = "l" * _WORDS + "r" * (len(shown) - _WORDS)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", ""])


def as_csv(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return all figures as CSV: a line for each run, a column for each benchmark and subset."""
    benchmarks = dict.fromkeys(name for entry in entries for name in entry["benchmarks"])
    subsets = sorted({name for entry in entries for name in entry["accuracy_by_subset"]})
    with io.StringIO(newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, entry in enumerate(entries):
            flat = dict(_flat(entry))
            flat |= {f"score {name}": entry["benchmarks"].get(name) for name in benchmarks}
            flat |= {f"subset {name}": entry["accuracy_by_subset"].get(name) for name in subsets}
            if number == 0:
                writer.writerow(flat)
            writer.writerow(flat.values())
        return file.getvalue()


def as_rewardbench(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a JSON list in RewardBench's format for each model: model, model_type, chat_template, its subsets."""
    models = [
        {
            "model": organisation_and_name(entry["model"]),
            "model_type": "Seq. Classifier" if entry["template"] else "Custom Classifier",
            "chat_template": entry["template"],
            **entry["accuracy_by_subset"],
        }
        for entry in entries
    ]
    return json.dumps(models, indent=4, sort_keys=True, allow_nan=False) + "\n"


FORMATS: Final[Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]]] = {
    "csv": as_csv,
    "latex": as_latex,
    "markdown": as_markdown,
    "rewardbench": as_rewardbench,
}
"""The output formats of a leaderboard by name."""


def format_leaderboard(entries: Sequence[Mapping[str, Any]], form: str) -> str:
    """Return the result of `leaderboard` as text in one of ``FORMATS``.

    Raises:
      RunError: the format is unknown.
    """
    if form not in FORMATS:
        raise RunError(f"format: expected {', '.join(FORMATS)}, found {quote(form)}")
    return FORMATS[form](entries)


def _flat(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in entry.items():
        if name.endswith("ci95"):
            low, high = value or (None, None)
            yield f"{name}_low", low
            yield f"{name}_high", high
        elif name not in ("benchmarks", "accuracy_by_subset"):
            yield name, value


def _latex(text: str) -> str:
    plain = re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", "/"))
    return plain.replace("~", r"\textasciitilde{}").replace("^", r"\textasciicircum{}").replace(NONE, "--")
