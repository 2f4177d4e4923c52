"""What verbs print: a model beside the baselines with intervals and by subset, sweeps of posts, questions, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from prb_jax.reports.style import NONE, facts_table, new_table, signed
from prb_jax.scoring.prompt_extras import told_of

if TYPE_CHECKING:
    from prb_jax.study.ask import Question

_BASELINE = "baseline:"  # how the names of scorers without a model begin

_MANY_TIES = 0.01  # share of the comparisons from which the half-credit accuracy is shown

_BASELINES_BY_SUBSET = ("baseline:length", "baseline:random", "baseline:profile-overlap")

_INTERVAL_WIDTH = 14  # "[0.741..0.776]" stays whole when a narrow terminal breaks the cell before it


def render_summary(summaries: Mapping[str, Mapping[str, Any]], *, title: str) -> Group:
    """Tables of one or more summaries, as ``prb_jax.metrics.summary.summarise`` gives them.

    Args:
      summaries: by the name to show. Baselines inside a summary follow it, each once.
      title: above the first table.

    Returns:
      A rich renderable: overall figures, then accuracy by subset where there are subsets, then what
      quantising changed where the model is quantised, then what each benchmark's own rule says.
    """
    shown = _with_baselines(summaries)
    parts: list[Table] = [_overall(shown, title=title)]
    if any(summary.get("by_subset") for summary in shown.values()):
        parts.append(_by_subset(shown))
    parts += [
        _quantization(name, summary["quantization"])
        for name, summary in summaries.items()
        if summary.get("quantization")
    ]
    names = dict.fromkeys(name for summary in summaries.values() for name in summary.get("benchmarks") or {})
    parts += [_benchmark(name, summaries) for name in names]
    return Group(*parts)


def interval(value: float | None, bounds: list[float] | None) -> str:
    """``0.759 [0.741..0.776]``: a figure with its 95 % interval, where there is one."""
    if value is None:
        return NONE
    # no space inside the brackets, so that a narrow terminal breaks the line before them
    shown = [f"{round(number, 3) + 0.0:.3f}" for number in (value, *(bounds or ()))]  # 0.000, never -0.000
    return shown[0] if bounds is None else f"{shown[0]} [{shown[1]}..{shown[2]}]"


def _with_baselines(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    shown: dict[str, Mapping[str, Any]] = dict(summaries)
    for summary in summaries.values():
        for name, figures in (summary.get("baselines") or {}).items():
            shown.setdefault(name, figures)
    return shown


def _overall(shown: Mapping[str, Mapping[str, Any]], *, title: str) -> Table:
    table = new_table(title)
    table.show_header = True
    table.add_column("model", overflow="fold")
    with_users = any(summary.get("users") for summary in shown.values())
    table.add_column("accuracy", min_width=_INTERVAL_WIDTH)
    if with_users:
        table.add_column("per user", min_width=_INTERVAL_WIDTH)
        table.add_column("coverage", justify="right")
    table.add_column("ties", justify="right")
    table.add_column("margin", justify="right")
    for name, summary in shown.items():
        cells = [_label(name), escape(interval(summary["accuracy"], summary.get("ci95")))]
        if with_users:
            cells.append(escape(interval(summary.get("user_accuracy"), summary.get("user_accuracy_ci95"))))
            cells.append(_number(summary.get("coverage"), "{:.3f}"))
        cells += [_number(summary["ties"], "{:,}"), _number(summary.get("mean_margin"), "{:.3g}")]
        table.add_row(*cells)
    table.caption = "\n".join(_notes(shown))
    return table


def _notes(shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the columns do not say: how many, over whom, what was cut."""
    # a baseline of votes speaks of some of the comparisons alone
    models = {name: summary for name, summary in shown.items() if "baselines" in summary} or shown
    sizes = {(summary["n"], summary.get("users") or 0) for summary in models.values()}
    notes = [escape(f"[..] 95 % interval{_over(shown)}")]
    if len(sizes) == 1:
        n, users = sizes.pop()
        notes.append(
            f"{n:,} comparisons" + (f" of {users:,} users" if users else "") + "; a tie is not a win"
        )
    else:
        for name, summary in models.items():
            notes.append(f"{_label(name)}: {summary['n']:,} comparisons")
    most = max(summary["n"] for summary in models.values())
    notes += [
        f"{_label(name)}: the {summary['n']:,} comparisons that other users judge too"
        for name, summary in shown.items()
        if name not in models and summary["n"] < most
    ]
    notes += _reasons(shown)
    for name, summary in shown.items():
        ties, n = summary["ties"] or 0, summary["n"]
        if ties > _MANY_TIES * n:
            half = summary["half_credit_accuracy"]
            notes.append(f"{_label(name)}: accuracy {half:.3f} if each of its {ties:,} ties counts half")
        if summary.get("coverage") is not None and not name.startswith(_BASELINE):
            notes.append(_coverage(name, summary))
        if told := told_of(summary.get("hints") or {}):
            notes.append(f"{_label(name)}: was told beside the profile: {escape(told)}")
        if summary.get("users_fitted_on"):
            notes.append(
                f"{_label(name)}: was fitted on {summary['users_fitted_on']:,} of these users, so that its figures are "
                "not those of new people"
            )
        if summary.get("unknown_users"):
            notes.append(f"{_label(name)}: {summary['unknown_users']:,} users are unknown to it")
        for reason, count in (summary.get("history_left_out") or {}).items():
            notes.append(f"{_label(name)}: left out of the history: {count:,} {reason}")
        if summary.get("truncated"):
            notes.append(f"{_label(name)}: text cut in {summary['truncated']:,} of {summary['n']:,}")
        readout = summary.get("readout")
        if readout not in (None, "logit"):
            notes.append(f"{_label(name)}: read-out {escape(readout)}")
        left_out = (summary.get("left_out") or {}).get("comparisons")
        if left_out:
            notes.append(
                f"{_label(name)}: {left_out:,} comparisons too long and left out, see left_out.jsonl"
            )
        notes += [f"{_label(name)}: {escape(note)}" for note in gains(summary.get("controls") or {})]
        compared = summary.get("baselines") or {}
        for baseline, figures in compared.items():
            if figures.get("difference") is not None:
                difference = interval(figures["difference"], figures.get("difference_ci95"))
                notes.append(f"{_label(name)} minus {_label(baseline)}: {escape(difference)}")
    return notes


def _over(shown: Mapping[str, Mapping[str, Any]]) -> str:
    """What the intervals are taken over, where it is the same for all."""
    over = set()
    for summary in shown.values():
        if "definitions" in summary:
            unit = "users" if summary.get("users") else "comparisons"
            if summary.get("users_derived"):
                unit = f"{summary['users']:,} users derived from shared posts"
            over.add(f" over {unit} and responses" if summary.get("crossed") else f" over {unit}")
    return over.pop() if len(over) == 1 else ""


def _reasons(shown: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why figures and intervals of the table are missing, each reason once."""
    reasons: dict[str, list[str]] = {}
    for name, summary in shown.items():
        for key, what in (("ci95", "interval"), ("user_accuracy_ci95", "interval"), ("coverage", "coverage")):
            reason = summary.get(f"{key}_reason")
            if reason and (summary.get("users") or key == "ci95"):
                what = "figure" if summary["accuracy"] is None else what
                reasons.setdefault(f"no {what}: {reason}", []).append(_label(name))
    return [
        escape(reason)
        if set(names) == {_label(name) for name in shown}
        else f"{', '.join(dict.fromkeys(names))}: {escape(reason)}"
        for reason, names in reasons.items()
    ]


def _coverage(name: str, summary: Mapping[str, Any]) -> str:
    served = escape(interval(summary["coverage"], summary.get("coverage_ci95")))
    return (
        f"{_label(name)}: serves {served} of {summary['users_testable']:,} testable users, "
        f"{summary['coverage_benjamini_hochberg']:.3f} after correction; {summary['coverage_by_chance']:.3f} by chance"
    )


def gains(controls: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what the controls say of the model, a sentence each."""
    said = {
        "blind": "knowing this user gains {}, against no profile",
        "swap": "this user's profile gains {}, against that of another user",
    }
    return [
        said[control].format(signed(figures["difference"], figures["difference_ci95"]))
        for control, figures in controls.items()
    ]


def _few_baselines(shown: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The results that have a column of their own: a table has no place for every baseline."""
    return {
        name: figures
        for name, figures in shown.items()
        if not name.startswith(_BASELINE) or name in _BASELINES_BY_SUBSET or next(iter(shown)) == name
    }


def _by_subset(shown: Mapping[str, Mapping[str, Any]]) -> Table:
    table = new_table("Accuracy by subset")
    table.show_header = True
    table.add_column("subset", overflow="fold")
    table.add_column("n", justify="right")
    shown = _few_baselines(shown)
    for name in shown:
        header = name.removeprefix(_BASELINE)  # the first table says that it is a baseline
        width = min(len(header), 8) if name.startswith(_BASELINE) else _INTERVAL_WIDTH
        table.add_column(escape(header), overflow="fold", min_width=width)
    subsets = sorted({subset for s in shown.values() for subset in s.get("by_subset") or {}})
    for subset in subsets:
        figures = {name: (s.get("by_subset") or {}).get(subset) for name, s in shown.items()}
        sizes = sorted({f["n"] for f in figures.values() if f})
        cells = [_subset_cell(f, with_interval=not name.startswith(_BASELINE)) for name, f in figures.items()]
        table.add_row(escape(subset), "/".join(f"{n:,}" for n in sizes), *cells)
    return table


def _quantization(name: str, figures: Mapping[str, Any]) -> Table:
    """The bytes of a model before quantising and as held."""
    before, held = figures["bytes_unquantized"], figures["bytes_held"]
    text = NONE if held is None else f"{before:,} -> {held:,} ({held / before:.0%})"
    return facts_table([("bytes of weights", text)], title=f"{name}, {figures['form']}")


def _benchmark(benchmark: str, summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """The score and figures of one benchmark, for each model and the baselines beside it."""
    shown: dict[str, Mapping[str, Any]] = {}
    for name, summary in summaries.items():
        result = (summary.get("benchmarks") or {}).get(benchmark)
        if result is not None:
            shown[name] = result
    for result in list(shown.values()):
        for name, compared in result["baselines"].items():
            shown.setdefault(name, compared)
    shown = _few_baselines(shown)
    table = new_table(benchmark)
    table.show_header = True
    table.add_column("", overflow="fold")
    for name in shown:
        table.add_column(escape(name.removeprefix(_BASELINE)), overflow="fold", justify="right")
    table.add_row("score", *(_number(result["score"], "{:.4f}") for result in shown.values()))
    if any(result.get("score_ci95") for result in shown.values()):
        bounds = [result.get("score_ci95") for result in shown.values()]
        table.add_row("95 % interval", *(escape(f"[{b[0]:.3f}..{b[1]:.3f}]") if b else NONE for b in bounds))
    for figure in dict.fromkeys(figure for result in shown.values() for figure in result["figures"]):
        cells = [_number(result["figures"].get(figure), "{:.4f}") for result in shown.values()]
        table.add_row(escape(figure), *cells)
    notes = dict.fromkeys(result["rule"] for result in shown.values() if "rule" in result)
    lacking = dict.fromkeys(name for result in shown.values() for name in result["missing"])
    if lacking:
        notes[f"not in the data: {', '.join(lacking)}"] = None
    for name, result in shown.items():
        if result.get("left_out"):
            notes[f"{name}: {result['left_out']:,} comparisons too long and left out"] = None
    table.caption = "\n".join(escape(f"score: {note}" if i == 0 else note) for i, note in enumerate(notes))
    return table


def _subset_cell(figures: Mapping[str, Any] | None, *, with_interval: bool) -> str:
    if figures is None:
        return NONE
    return escape(interval(figures["accuracy"], figures.get("ci95") if with_interval else None))


def _label(name: str) -> str:
    """``baseline:length`` as "length (baseline)", which breaks well in a narrow column."""
    if name.startswith(_BASELINE):
        return f"{escape(name.removeprefix(_BASELINE))} (baseline)"
    return escape(name)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def render_posts(points: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Return a line for each of the points of `posts.json`.

    Args:
      points: as of `prb_jax.study.posts.PostsSweep`.
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


_NO_INFORMATION: Final = 1e-9
"""Nats below which an answer tells nothing but rounding."""


def render_questions(questions: Sequence[Question], *, top: int) -> Table:
    """Return a line for each of the first questions, and what a random one would tell."""
    from rich.markup import escape

    ruled = questions[0].pref_rule is not None
    headings = ["question", "information", "prefers the first", *(["PReF's rule"] if ruled else [])]
    table = new_table("The questions that tell most", headings)
    for question in questions[:top]:
        cells = [f"{question.information:.4f}", f"{question.probability:.2f}"]
        cells += [] if question.pref_rule is None else [f"{question.pref_rule:.3g}"]
        table.add_row(escape(question.id), *cells)
    mean = float(np.mean([question.information for question in questions]))
    caption = [f"information in nats; a question at random: {mean:.4f}"]
    if max(question.information for question in questions) < _NO_INFORMATION:
        caption.append(
            "no answer tells anything: when the method was fitted, it found nothing in which people differ, so that "
            "it is the same for everybody; `numbers` in study.json says what was chosen"
        )
    if ruled:
        chosen = max(questions, key=lambda question: question.pref_rule or 0.0)
        caption.append(f"PReF's rule asks {chosen.id}: {chosen.information:.4f}")
    table.caption = escape("\n".join(caption))
    return table


def training_table(summary: Mapping[str, Any], *, title: str) -> Table:
    """One row of numbers for training and one for validation, with what was trained on below.

    Args:
      summary: what `summary.json` of a run of `prb train` holds.
      title: above the table.
    """
    table = new_table(title, ("", "comparisons", "loss", "accuracy", "margin"))
    rows = [("training, last tenth", summary["train_comparisons"], summary["last_tenth"])]
    if summary["validation"] is not None:
        name = f"validation at step {summary['exported_step']:,}"
        rows.append((name, summary["validation_comparisons"], summary["validation"]))
    for name, count, numbers in rows:
        table.add_row(
            name,
            f"{count:,}",
            f"{numbers['loss']:.4f}",
            f"{numbers['accuracy']:.3f}",
            f"{numbers['margin']:.3f}",
        )
    trained, parameters = summary["trained_parameters"], summary["parameters"]
    table.caption = (
        f"{summary['steps']:,} steps, {summary['pairs_seen']:,} comparisons and {summary['tokens_seen']:,} tokens "
        f"seen, {trained:,} of {parameters:,} parameters trained"
    )
    return table
