"""Summaries for people: the answer in one sentence, and one table of a model, its controls, baselines and subsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prb_jax.errors import counted
from prb_jax.metrics.summary import LENGTH_BASELINE
from prb_jax.reports.table import (
    NONE,
    Table,
    answered,
    bounded,
    change,
    field,
    gained,
    interval,
    number,
    percent,
    signed,
)
from prb_jax.scoring import VOTES
from prb_jax.scoring.prompt_extras import told_of
from prb_jax.trees.tree import EQUAL_SIDES, EqualSides

if TYPE_CHECKING:
    from rich.console import Group

Summaries = Mapping[str, Mapping[str, Any]]  # summaries by the name to show
_BASELINE = "baseline:"  # prefix of scorers without a model
MANY_TIES = 0.01  # minimum share of ties for showing the half-credit accuracy
_MANY_TIES_OF_BASELINE = 0.05  # the same for baselines, of which a reader wants to know less
_MOST_SUBSETS = 12  # maximum number of subsets in a terminal
_MOST_REMARKS = 4

HEADLINE = {
    "n": field("n", "{:,}"),
    "accuracy": bounded("accuracy", "ci95"),
    "mean over users": bounded("user_accuracy"),
    "users served": bounded("coverage"),
    "ties": field("ties", "{:,}"),
    "mean margin": field("mean_margin", "{:.3g}"),
}
"""Columns of the main figures of a summary."""

POSTS = {
    "posts": field("profile_posts"),
    "accuracy": bounded("accuracy", "ci95"),
    "minus the fewest posts": change("difference"),
    "comparisons with cut text": field("truncated", "{:,}"),
}
"""Columns of the points of `posts.json`."""


def answer(summary: Mapping[str, Any], *, name: str, unit: str = "comparison") -> str:
    """Return the answer of a summary in one sentence: accuracy, worth of the profile, and the length baseline."""
    if summary["accuracy"] is None:
        return f"{name} has no accuracy on these data: {summary.get('ci95_reason')}."
    if told := told_of(summary.get("hints") or {}):
        name = f"{name}, which was told more than the profile ({told}),"
    best = "what the user wants" if summary.get("users") else "the better response"
    share, of = percent(summary["accuracy"], summary.get("ci95")), counted(summary["n"], unit)
    parts = [f"{name} prefers {best} in {share} of {of}"]
    controls = summary.get("controls") or {}
    worth = {
        "blind": "the profile is worth {}",
        "swap": "the user's own profile is worth {} more than another's",
    }
    for control, figures in sorted(controls.items()):  # one of the two is enough here
        if control in worth and figures["difference"] is not None:
            parts.append(worth[control].format(gained(figures["difference"], figures["difference_ci95"])))
            break
    for benchmark, result in (summary.get("benchmarks") or {}).items():
        if result.get("score") is not None:
            parts.append(f"its score on {benchmark} is {result['score']:.4f}")
    length = (summary.get("baselines") or {}).get(LENGTH_BASELINE) or {}
    if length.get("accuracy") is not None and summary.get("model") != LENGTH_BASELINE:
        parts.append(f"length would give {percent(length['accuracy'], None)}")
    return "; ".join(parts) + "."


def served(summary: Mapping[str, Any]) -> str:
    """Return the coverage of a summary in words; empty without one."""
    if summary.get("coverage") is None:
        return ""
    testable = summary["users_testable"]
    users, corrected, lucky = (
        summary[f"coverage{key}"] * testable for key in ("", "_benjamini_hochberg", "_by_chance")
    )
    return (
        f"for {users:.0f} of the {counted(testable, 'user')} with enough comparisons to test it is right more "
        f"often than by chance ({corrected:.0f} after correction for so many tests; {lucky:.1f} by guessing)"
    )


def headline(summaries: Summaries, *, title: str = "", note: str = "") -> Table:
    """Return the table of the main figures of several summaries."""
    rows = [{"name": name, **summary} for name, summary in summaries.items()]
    return Table.of(title, rows, {"run": field("name"), **HEADLINE}, note=note)


def gains(controls: Summaries) -> list[str]:
    """Return the results of the controls, one sentence each."""
    said = {
        "blind": "knowing this user gains {}, against no profile",
        "swap": "this user's profile gains {}, against another user's profile",
    }
    return [
        said[control].format(signed(figures["difference"], figures["difference_ci95"]))
        for control, figures in controls.items()
        if figures["difference"] is not None
    ]


def scorers(summary: Mapping[str, Any], *, name: str) -> dict[str, Mapping[str, Any]]:
    """Return the summaries within a summary, by display name: the model, its controls, the baselines.

    Baselines that are undefined on these data are left out, and so is a baseline that is the model.
    """
    said = {"blind": "shown no profile", "swap": "shown another user's profile"}
    controls = (summary.get("controls") or {}).items()
    within = {f"{name}, {said.get(control, control)}": figures for control, figures in controls}
    baselines = {
        baseline: figures
        for baseline, figures in (summary.get("baselines") or {}).items()
        if figures["accuracy"] is not None and baseline != summary.get("model")
    }
    return {name: summary, **within, **baselines}


def about_figure(name: str, summary: Mapping[str, Any], *, of: int) -> str:
    """Return a remark for an accuracy that needs one; empty for all others.

    Many ties, fewer comparisons than the model's ``of``, and votes of others that are mostly for another response.
    """
    parts, n, ties = [], summary["n"], summary.get("ties") or 0
    if n < of:
        parts.append(f"on the {counted(n, 'comparison')} that others judge too")
    if name in VOTES and summary["accuracy"] is not None and 1 - summary["accuracy"] - ties / n > 0.5:
        parts.append("the others mostly prefer another response")
    many = _MANY_TIES_OF_BASELINE if name.startswith(_BASELINE) else MANY_TIES
    if ties > many * n and summary.get("half_credit_accuracy") is not None:
        parts.append(
            f"{ties / n:.0%} ties, not wins ({summary['half_credit_accuracy']:.3f} if each counts half)"
        )
    return "; ".join(parts)


def render_summary(summary: Mapping[str, Any], *, title: str) -> Group:
    """Return the answer of a summary and its table, as returned by ``prb_jax.metrics.summary.summarise``.

    The table has the model, its controls and the baselines, then the scores of benchmarks, then the subsets.
    """
    name = _label(str(summary.get("model", "the model")))
    shown = scorers(summary, name=name)
    columns = {
        "": lambda row: _label(row["name"].removeprefix(f"{name}, ")),
        "accuracy": HEADLINE["accuracy"],
        "the model\nminus it": change("difference"),
        "per user": field("user_accuracy", "{:.3f}"),
        "users\nserved": field("coverage", "{:.3f}"),
        "ties": lambda row: number(row.get("ties") or None, "{:,}"),
    }
    rows: list[list[str]] = [
        [getter({"name": one, **figures}) for getter in columns.values()] for one, figures in shown.items()
    ]
    for part in (_benchmark_rows(summary), _subset_rows(summary)):
        rows += [[], *([*cells, *[NONE] * (len(columns) - len(cells))] for cells in part)] if part else []
    # a column without a figure, and a dash, tell nothing
    kept = [k for k in range(len(columns)) if any(row and row[k] not in (NONE, "") for row in rows)]
    cells = [["" if row[k] == NONE else row[k] for k in kept] if row else [] for row in rows]
    heads = [list(columns)[k] for k in kept]
    notes = list(_notes(summary, shown, name))
    return answered(Table("", heads, cells), answer=answer(summary, name=name), notes=notes, title=title)


def _subset_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each subset, or the lowest of many."""
    parts = summary.get("by_subset") or {}
    names = sorted(parts)
    if len(names) > _MOST_SUBSETS:
        names = sorted(names, key=lambda name: parts[name]["accuracy"] or 0.0)[:_MOST_SUBSETS]
    rows = [
        [f"{name} ({parts[name]['n']:,})", interval(parts[name]["accuracy"], parts[name].get("ci95"))]
        for name in names
    ]
    rest = len(parts) - len(names)
    return [*rows, [f"and {rest:,} subsets that are higher", ""]] if rest else rows


def _benchmark_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return the score of each benchmark, and the figures that make it up."""
    rows = []
    for benchmark, result in (summary.get("benchmarks") or {}).items():
        rows.append([f"{benchmark}: score", interval(result["score"], result.get("score_ci95"))])
        rows += [[f"{benchmark}: {name}", number(value)] for name, value in result["figures"].items()]
    return rows


def _notes(summary: Mapping[str, Any], shown: Summaries, name: str) -> Iterator[str]:
    """Yield three lines at most: sizes, users served, and facts that a reader must know."""
    unit = "users" if summary.get("users") else "comparisons"
    if summary.get("users_derived"):
        unit = f"{summary['users']:,} users derived from shared posts"
    over = f"{unit} and responses" if summary.get("crossed") else unit
    users = f" of {counted(summary['users'], 'user')}" if summary.get("users") else ""
    yield f"[..] 95 % interval over {over}; {counted(summary['n'], 'comparison')}{users}; a tie is not a win"
    if text := served(summary):
        yield f"users served: {text}"
    remarks = [*_remarks(summary), *_reasons(shown, summary)]
    for other, figures in shown.items():
        if about := about_figure(other, figures, of=summary["n"]):
            remarks.append(about if other == name else f"{_label(other)}: {about}")
    if remarks:
        more = "; see summary.json" if len(remarks) > _MOST_REMARKS else ""
        yield "; ".join(remarks[:_MOST_REMARKS]) + (
            f"; and {counted(len(remarks) - _MOST_REMARKS, 'more remark')}{more}" if more else ""
        )


def _reasons(shown: Summaries, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the distinct reasons why figures and intervals of the model, and whole baselines, are missing."""
    if summary["accuracy"] is not None:
        reasons: dict[str, None] = {}
        for key, what in (
            ("ci95", "interval"),
            ("user_accuracy_ci95", "interval"),
            ("coverage", "users served"),
        ):
            if (reason := summary.get(f"{key}_reason")) and (summary.get("users") or key == "ci95"):
                reasons[f"no {what}: {reason}"] = None
        yield from reasons
    if undefined := [name.removeprefix(_BASELINE) for name in _undefined(summary)]:
        yield f"undefined on these data, see summary.json: {', '.join(undefined)}"


def _undefined(summary: Mapping[str, Any]) -> list[str]:
    baselines = (summary.get("baselines") or {}).items()
    return [name for name, figures in baselines if figures["accuracy"] is None]


def undefined_baselines(summary: Mapping[str, Any]) -> list[str]:
    """Return the baselines without a figure on these data, with the distinct reasons."""
    reasons: dict[str, list[str]] = {}
    for name in _undefined(summary):
        reason = str(summary["baselines"][name].get("ci95_reason"))
        reasons.setdefault(reason, []).append(name.removeprefix(_BASELINE))
    return [f"no {', no '.join(names)}: {reason}" for reason, names in reasons.items()]


def _remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield facts about the model beyond the columns: hints, unknown users, cut or excluded text."""
    if told := told_of(summary.get("hints") or {}):
        yield f"was told, in addition to the profile: {told}"
    if known := summary.get("users_fitted_on"):
        yield f"was fitted on {known:,} of these users, so its figures do not apply to new people"
    if unknown := summary.get("unknown_users"):
        yield f"{unknown:,} users are unknown to it"
    if left_out := (summary.get("left_out") or {}).get("comparisons"):
        yield f"{counted(left_out, 'comparison')} too long and left out, see left_out.jsonl"
    if equal := summary.get(EQUAL_SIDES):
        yield f"{EqualSides(**equal)}: no model can win them"
    if cut := summary.get("truncated"):
        yield f"text cut in {cut:,} of {summary['n']:,}"
    if lacking := summary.get("users_without_history"):
        yield f"the history knows nothing of {lacking:,} of {counted(summary['users'], 'user')}"
    for reason, count in (summary.get("history_left_out") or {}).items():
        yield f"left out of the history: {count:,} {reason}"
    for benchmark, result in (summary.get("benchmarks") or {}).items():
        if result["missing"]:
            yield f"{benchmark}: not in the data: {', '.join(result['missing'])}"
        if "rule" in result:
            yield f"{benchmark}: {result['rule']}"
    if quantized := summary.get("quantization"):
        before, held = quantized["bytes_unquantized"], quantized["bytes_held"]
        if held is not None:
            yield f"weights in {quantized['form']}: {before:,} -> {held:,} bytes ({held / before:.0%})"
    if (readout := summary.get("readout")) not in (None, "logit"):
        yield f"read-out {readout}"


def _label(name: str) -> str:
    """Return ``baseline:length`` as "length (baseline)", which wraps well in a narrow column."""
    return f"{name.removeprefix(_BASELINE)} (baseline)" if name.startswith(_BASELINE) else name


def posts_answer(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the gain of the most posts of the profile over the fewest, from the points of `posts.json`."""
    fewest, most = points[0], points[-1]
    if most.get("accuracy") is None:
        return "The accuracy is not defined on these data."
    share = percent(most["accuracy"], most.get("ci95"))
    text = f"With {counted(most['profile_posts'], 'post')} of the profile the accuracy is {share}"
    if most.get("difference") is not None:
        gain = gained(most["difference"], most.get("difference_ci95"))
        text += f"; against {counted(fewest['profile_posts'], 'post')} this is {gain}"
    return f"{text}."


def render_posts(points: Sequence[Mapping[str, Any]], *, title: str) -> Group:
    """Return the answer and a line for each of the points of `posts.json`, see `prb_jax.study.posts.PostsSweep`."""
    notes = [f"[..] 95 % interval; {counted(points[0]['n'], 'comparison')}"]
    return answered(Table.of("", points, POSTS), answer=posts_answer(points), notes=notes, title=title)
