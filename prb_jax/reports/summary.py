"""Tables of summaries: a model with the baselines, by subset, by benchmark, and by the number of posts shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group

from prb_jax.reports.table import NONE, Table, bounded, change, facts_table, field, interval, number, signed
from prb_jax.scoring.prompt_extras import told_of
from prb_jax.trees.tree import EQUAL_SIDES, EqualSides

Summaries = Mapping[str, Mapping[str, Any]]  # summaries by the name to show
_BASELINE = "baseline:"  # prefix of scorers without a model
_BASELINES_BY_SUBSET = ("baseline:length", "baseline:random", "baseline:profile-overlap")
_MANY_TIES = 0.01  # minimum share of ties for showing the half-credit accuracy

HEADLINE = {
    "n": field("n", "{:,}"),
    "accuracy": bounded("accuracy", "ci95"),
    "mean over users": bounded("user_accuracy"),
    "coverage": bounded("coverage"),
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
    """Return the summaries within a summary, by display name: the model, its controls, the baselines."""
    said = {"blind": "shown no profile", "swap": "shown another user's profile"}
    controls = (summary.get("controls") or {}).items()
    within = {f"{name}, {said.get(control, control)}": figures for control, figures in controls}
    return {name: summary, **within, **(summary.get("baselines") or {})}


def render_summary(summaries: Summaries, *, title: str) -> Group:
    """Return tables of summaries by display name, as returned by ``prb_jax.metrics.summary.summarise``.

    First overall figures, with each baseline once; then accuracy by subset, if any, the effect of quantising, for a
    quantised model, and the figures by each benchmark's own rule.
    """
    shown = dict(summaries)
    for summary in summaries.values():
        shown |= {name: s for name, s in (summary.get("baselines") or {}).items() if name not in shown}
    parts = [_overall(shown, title)]
    if subsets := sorted({subset for s in shown.values() for subset in s.get("by_subset") or {}}):
        parts.append(_by_subset(_few_baselines(shown), subsets))
    for name, summary in summaries.items():
        if quantized := summary.get("quantization"):
            before, held = quantized["bytes_unquantized"], quantized["bytes_held"]
            text = NONE if held is None else f"{before:,} -> {held:,} ({held / before:.0%})"
            parts.append(facts_table([("bytes of weights", text)], title=f"{name}, {quantized['form']}"))
    names = dict.fromkeys(name for summary in summaries.values() for name in summary.get("benchmarks") or {})
    return Group(*parts, *(_benchmark(name, summaries) for name in names))


def _overall(shown: Summaries, title: str) -> Table:
    columns = {"model": field("label"), "accuracy": HEADLINE["accuracy"]}
    words = len(columns)
    if any(summary.get("users") for summary in shown.values()):
        columns |= {"per user": HEADLINE["mean over users"], "coverage": field("coverage", "{:.3f}")}
        words += 1
    columns |= {"ties": HEADLINE["ties"], "margin": HEADLINE["mean margin"]}
    rows = [{"label": _label(name), **summary} for name, summary in shown.items()]
    notes = [f"[..] 95 % interval{_over(shown)}", *_sizes(shown), *_reasons(shown)]
    notes += [remark for name, summary in shown.items() for remark in _remarks(name, summary)]
    return Table.of(title, rows, columns, words=words, note="\n".join(notes))


def _over(shown: Summaries) -> str:
    """Return the units of the intervals, if they are the same for all."""
    over = set()
    for summary in shown.values():
        if "definitions" in summary:
            unit = "users" if summary.get("users") else "comparisons"
            if summary.get("users_derived"):
                unit = f"{summary['users']:,} users derived from shared posts"
            over.add(f" over {unit} and responses" if summary.get("crossed") else f" over {unit}")
    return over.pop() if len(over) == 1 else ""


def _sizes(shown: Summaries) -> Iterator[str]:
    """Yield the numbers of comparisons; a baseline of votes only covers some of them."""
    models = {name: summary for name, summary in shown.items() if "baselines" in summary} or shown
    sizes = {(summary["n"], summary.get("users") or 0) for summary in models.values()}
    if len(sizes) == 1:
        n, users = sizes.pop()
        yield f"{n:,} comparisons" + (f" of {users:,} users" if users else "") + "; a tie is not a win"
    else:
        yield from (f"{_label(name)}: {summary['n']:,} comparisons" for name, summary in models.items())
    most = max(summary["n"] for summary in models.values())
    for name, summary in shown.items():
        if name not in models and summary["n"] < most:
            yield f"{_label(name)}: the {summary['n']:,} comparisons that other users judge too"


def _reasons(shown: Summaries) -> list[str]:
    """Return the distinct reasons why figures and intervals of the table are missing."""
    reasons: dict[str, dict[str, None]] = {}
    for name, summary in shown.items():
        for key, what in (("ci95", "interval"), ("user_accuracy_ci95", "interval"), ("coverage", "coverage")):
            reason = summary.get(f"{key}_reason")
            if reason and (summary.get("users") or key == "ci95"):
                what = "figure" if summary["accuracy"] is None else what
                reasons.setdefault(f"no {what}: {reason}", {})[_label(name)] = None
    return [
        reason if len(names) == len(shown) else f"{', '.join(names)}: {reason}"
        for reason, names in reasons.items()
    ]


def _remarks(name: str, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield facts about one model beyond the columns: users served, hints, cut or excluded text."""
    label, n, ties = _label(name), summary["n"], summary["ties"] or 0
    if ties > _MANY_TIES * n and summary["half_credit_accuracy"] is not None:
        yield f"{label}: accuracy {summary['half_credit_accuracy']:.3f} if each of its {ties:,} ties counts half"
    if summary.get("coverage") is not None and not name.startswith(_BASELINE):
        yield (
            f"{label}: serves {interval(summary['coverage'], summary.get('coverage_ci95'))} of "
            f"{summary['users_testable']:,} testable users, {summary['coverage_benjamini_hochberg']:.3f} after "
            f"correction; {summary['coverage_by_chance']:.3f} by chance"
        )
    if told := told_of(summary.get("hints") or {}):
        yield f"{label}: was told, in addition to the profile: {told}"
    if known := summary.get("users_fitted_on"):
        yield f"{label}: was fitted on {known:,} of these users, so its figures do not apply to new people"
    if unknown := summary.get("unknown_users"):
        yield f"{label}: {unknown:,} users are unknown to it"
    for reason, count in (summary.get("history_left_out") or {}).items():
        yield f"{label}: left out of the history: {count:,} {reason}"
    if cut := summary.get("truncated"):
        yield f"{label}: text cut in {cut:,} of {n:,}"
    if equal := summary.get(EQUAL_SIDES):
        yield f"{label}: {EqualSides(**equal)}: no model can win them"
    if (readout := summary.get("readout")) not in (None, "logit"):
        yield f"{label}: read-out {readout}"
    if left_out := (summary.get("left_out") or {}).get("comparisons"):
        yield f"{label}: {left_out:,} comparisons too long and left out, see left_out.jsonl"
    yield from (f"{label}: {gain}" for gain in gains(summary.get("controls") or {}))
    for baseline, figures in (summary.get("baselines") or {}).items():
        if figures.get("difference") is not None:
            difference = interval(figures["difference"], figures.get("difference_ci95"))
            yield f"{label} minus {_label(baseline)}: {difference}"


def _few_baselines(shown: Summaries) -> dict[str, Mapping[str, Any]]:
    """Return the results that get a separate column: a table has no room for every baseline."""
    return {
        name: figures
        for place, (name, figures) in enumerate(shown.items())
        if not name.startswith(_BASELINE) or name in _BASELINES_BY_SUBSET or place == 0
    }


def _by_subset(shown: Summaries, subsets: Sequence[str]) -> Table:
    heads = ("subset", "n", *(name.removeprefix(_BASELINE) for name in shown))
    rows = []
    for subset in subsets:
        figures = {name: (summary.get("by_subset") or {}).get(subset) for name, summary in shown.items()}
        sizes = "/".join(f"{n:,}" for n in sorted({part["n"] for part in figures.values() if part}))
        cells = (
            interval(part["accuracy"], None if name.startswith(_BASELINE) else part.get("ci95"))
            if part
            else NONE
            for name, part in figures.items()
        )
        rows.append((subset, sizes, *cells))
    return Table("Accuracy by subset", heads, rows)


def _benchmark(benchmark: str, summaries: Summaries) -> Table:
    """Return the score and figures of one benchmark for each model and the baselines."""
    by_model = {name: (summary.get("benchmarks") or {}).get(benchmark) for name, summary in summaries.items()}
    shown: dict[str, Mapping[str, Any]] = {
        name: result for name, result in by_model.items() if result is not None
    }
    for result in list(shown.values()):
        shown |= {name: part for name, part in result["baselines"].items() if name not in shown}
    shown = _few_baselines(shown)
    results = list(shown.values())
    rows = [("score", *(number(result["score"], "{:.4f}") for result in results))]
    bounds = [result.get("score_ci95") for result in results]
    if any(bounds):
        rows.append(("95 % interval", *(f"[{b[0]:.3f}..{b[1]:.3f}]" if b else NONE for b in bounds)))
    for figure in dict.fromkeys(figure for result in results for figure in result["figures"]):
        rows.append((figure, *(number(result["figures"].get(figure), "{:.4f}") for result in results)))
    notes = list(dict.fromkeys(result["rule"] for result in results if "rule" in result))
    notes[:1] = [f"score: {note}" for note in notes[:1]]
    if lacking := dict.fromkeys(name for result in results for name in result["missing"]):
        notes.append(f"not in the data: {', '.join(lacking)}")
    for name, result in shown.items():
        if result.get("left_out"):
            notes.append(f"{name}: {result['left_out']:,} comparisons too long and left out")
    heads = ("", *(name.removeprefix(_BASELINE) for name in shown))
    return Table(benchmark, heads, rows, note="\n".join(notes))


def _label(name: str) -> str:
    """Return ``baseline:length`` as "length (baseline)", which wraps well in a narrow column."""
    return f"{name.removeprefix(_BASELINE)} (baseline)" if name.startswith(_BASELINE) else name


def render_posts(points: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Return a line for each of the points of `posts.json`, see `prb_jax.study.posts.PostsSweep`."""
    return Table.of(title, points, POSTS, note=f"[..] 95 % interval; {points[0]['n']:,} comparisons")
