"""`prb leaderboard`: all runs below a folder in one table, in the formats of papers and leaderboards."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.errors import RunError, counted, quote
from prb_jax.records.benchmarks.benchmark import AGGREGATES, organisation_and_name
from prb_jax.records.reading import read_json, read_object
from prb_jax.records.schema import check_schema
from prb_jax.reports.table import NONE, Getter, Table, bounded, change, field
from prb_jax.runs.evaluation import EVALUATION, SCORES
from prb_jax.runs.finished import read_finished
from prb_jax.runs.kind import RUN, SUMMARY
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.prompt_extras import told_of

if TYPE_CHECKING:
    from rich.console import Group

_FIGURES = (
    "n", "accuracy", "ci95", "ties", "half_credit_accuracy", "user_accuracy", "user_accuracy_ci95", "coverage",
    "mean_margin",
)  # fmt: skip


def leaderboard(
    folder: str | Path, *, unfinished: bool = False, controls: bool = False, upper_bounds: bool = False
) -> list[dict[str, Any]]:
    """Return the runs of `prb evaluate` in a folder and its subfolders, grouped by data.

    Args:
      folder: Folder to search, at any depth.
      unfinished: Include runs without a summary; their figures are None.
      controls: Include the controls of runs, which are separate runs within them.
      upper_bounds: Include runs with information that no real model has, e.g. the true rubric or narrative, and runs of
        `baseline:persona-truth`.

    Returns:
      One dict for each run, by data and then from the best to the worst accuracy, with ties counted half: run (its
      folder), model, data, protocol, profile_posts, hints (what else the model was told, in words), upper_bound,
      comparisons, scored, the figures of its summary, gain and gain_ci95 (of knowing the user, if there is a blind
      control), benchmarks (score by name), accuracy_by_subset, template.

    Raises:
      RunError: the folder does not exist or contains no such run; a file of a run cannot be read.
    """
    top = Path(folder)
    if not top.is_dir():
        raise RunError(f"{top}: expected a folder with runs, found {'a file' if top.exists() else 'nothing'}")
    entries = []
    for path in sorted(top.rglob(RUN)):
        found = read_json(path, error=RunError)
        if isinstance(found, dict) and found.get("kind") == EVALUATION.name:
            record = EVALUATION.read(path.parent)
            assert record is not None
            entries.append(_entry(top, path.parent, record))
    kept = [
        entry for entry in entries
        if (unfinished or entry["finished"])
        and (controls or entry["control"] is None)
        and (upper_bounds or not entry["upper_bound"])
    ]  # fmt: skip
    if not kept:
        waiting = sum(not entry["finished"] for entry in entries)
        more = f"; {waiting} are not finished: --unfinished shows them" if waiting else ""
        raise RunError(f"{top}: no finished run of `prb evaluate` in it or below it{more}")
    return sorted(kept, key=lambda entry: (entry["data"], -_rank_value(entry), entry["run"]))


def _rank_value(entry: Mapping[str, Any]) -> float:
    """Return the accuracy with ties counted half, so coarse scores do not rank below fine ones."""
    half = entry["half_credit_accuracy"]  # absent in summaries of earlier versions
    return (entry["accuracy"] if half is None else half) or 0.0


def _entry(top: Path, path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    inputs = record["inputs"]
    finished, scores = (path / SUMMARY).exists(), path / SCORES
    summary = read_finished(path).summary if finished else {}
    blind = (summary.get("controls") or {}).get("blind") or {}
    return {
        "run": path.name if path == top else path.relative_to(top).as_posix(),
        "model": str(record.get("model")),
        "data": " ".join(map(str, record.get("data") or ())) or str((inputs.get("data") or {}).get("sha256")),
        "protocol": inputs.get("protocol"),
        "profile_posts": inputs.get("profile_posts"),
        "control": inputs.get("control"),
        "hints": told_of(inputs.get("hints") or {}),
        "upper_bound": UPPER_BOUND in (inputs.get("hints") or {})
        or UPPER_BOUND in (inputs.get("model") or {}),
        "finished": finished,
        "comparisons": (inputs.get("data") or {}).get("comparisons"),
        "scored": summary["n"] if finished else scores.read_bytes().count(b"\n") if scores.exists() else 0,
        **{name: summary.get(name) for name in _FIGURES},
        "gain": blind.get("difference"),
        "gain_ci95": blind.get("difference_ci95"),
        "benchmarks": {name: one["score"] for name, one in (summary.get("benchmarks") or {}).items()},
        "accuracy_by_subset": _by_subset(path, record, summary),
        "template": (inputs.get("model") or {}).get("template"),
    }


def _by_subset(path: Path, record: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return accuracy by subset; for RewardBench's own subsets, the values of its result file, by its own rule."""
    figures = dict(summary.get("accuracy_by_subset") or {})
    name = organisation_and_name(str(record.get("model")))
    for benchmark in summary.get("benchmarks") or {}:
        file = path / benchmark / AGGREGATES / f"{name}.json"
        if file.exists():
            subset_figures = read_object(file, error=RunError)
            own = {key: value for key, value in subset_figures.items() if key in figures}
            check_schema(own, dict[str, float | None], where=str(file), error=RunError)
            figures |= own
    return figures


def _view(entry: Mapping[str, Any]) -> str:
    view = f"{entry['protocol']}, {counted(entry['profile_posts'], 'post')}"
    return f"{view}, {entry['hints']}" if entry["hints"] else view


_COLUMNS: Final[Mapping[str, Getter]] = {
    "run": field("run"),
    "model": field("model"),
    "data": lambda entry: f"{entry['data']}, {_view(entry)}",
    "n": lambda entry: (
        f"{entry['scored']:,}" + ("" if entry["finished"] else f" of {entry['comparisons']:,}")
    ),
    "accuracy": bounded("accuracy", "ci95"),
    "per user": bounded("user_accuracy"),
    "coverage": field("coverage", "{:.3f}"),
    "gain": change("gain"),
}
_HALF_CREDIT: Final[Mapping[str, Getter]] = {"half credit": field("half_credit_accuracy", "{:.3f}")}
_WORDS: Final = 3  # number of text columns at the left


def _columns(entries: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Getter]:
    """Return these columns, and after the accuracy the one with half credit if any run has ties."""
    columns: dict[str, Getter] = {}
    for name in names:
        columns[name] = _COLUMNS[name]
        if name == "accuracy" and any(entry["ties"] for entry in entries):
            columns |= _HALF_CREDIT
    return columns


def render_leaderboard(entries: Sequence[Mapping[str, Any]]) -> Group:
    """Return tables for the terminal, one for each data set; intervals are below their figures."""
    from rich.console import Group

    columns: dict[str, Getter] = {"run": lambda entry: f"{entry['run']}\n{entry['model']}, {_view(entry)}"}
    for head, getter in _columns(entries, ("n", "accuracy", "coverage", "gain")).items():
        columns[head] = lambda entry, getter=getter: getter(entry).replace(" [", "\n[")
    note = "[..] 95 % interval; gain: of knowing the user, against no profile"
    by_data = {
        data: [e for e in entries if e["data"] == data] for data in dict.fromkeys(e["data"] for e in entries)
    }
    last = entries[-1]["data"]
    return Group(
        *(
            Table.of(data, of_data, columns, whole=True, narrow=True, note=note if data == last else "")
            for data, of_data in by_data.items()
        )
    )


def as_markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = Table.of("", entries, _columns(entries, _COLUMNS), words=_WORDS).markdown(
        lambda text: text.replace("|", r"\|")
    )
    return "".join(f"{line}\n" for line in lines)


def as_latex(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in LaTeX, with the rules of the package booktabs."""
    shown = _columns(entries, _COLUMNS)
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
