"""`prb audit DIR --report`: the figures of an audit so far, and sentences for a paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from prb_jax.building.auditing.figures import (
    adjudication_queue,
    attention_figures,
    fit_figures,
    make_table,
    quality_figures,
)
from prb_jax.building.auditing.folder import REPORT
from prb_jax.building.auditing.judgements import read_state
from prb_jax.errors import counted
from prb_jax.records.writing import write_json
from prb_jax.reports.audit import audit_chapter
from prb_jax.reports.page import check_page, write_page

DEFINITIONS: Final[Mapping[str, str]] = {
    "items": "pairs of the audit, without gold items",
    "judged": "items with at least one judgement; complete: items with as many annotators as the audit plans",
    "over": "clusters of the intervals: the users of the items if every item names one and some share one, "
    "else the items",
    "ci95": "95 % interval over users or items, for these annotators: of coefficients of agreement by the "
    "bootstrap (percentiles of 2,000 resamples), of shares a score interval as in docs/statistics.md",
    "ci95_annotators": "95 % interval over users or items and over annotators: of coefficients by a "
    "bootstrap that draws both, in which an annotator drawn twice is not paired with himself; of shares "
    "two-way clustered",
    "reasons": "why a figure or an interval is null",
    "fit.agreement": "agreement on personal fit; the two categories are the responses in a random order for "
    "each item (`first` in the export), can't tell is missing: alpha (Krippendorff), fleiss "
    "(Fleiss' kappa), ac1 (Gwet), observed (share of equal pairs of judgements of an item, mean "
    "over items)",
    "fit.cohen": "Cohen's kappa of every two annotators over the items that both judged, and the mean over these pairs",
    "fit.label": "share of the judgements of personal fit that match the label",
    "fit.majority": "share of the items with a majority whose majority matches the label; tied: items without one",
    "quality": "for each criterion, alpha (Krippendorff, ordinal) of the ratings, and the difference",
    "difference": "rating of the chosen response minus rating of the rejected one: the mean over items of the means "
    "over annotators; overall: of the mean of the criteria",
    "equivalent": "whether two one-sided t tests at level 0.05 show that the difference is within the margin, "
    "which was fixed before the first judgement; p: the larger p-value; ci90: the interval that must be within the "
    "margin",
    "annotators": "gold_right of gold: gold items whose personal fit was found; again_same of again: items judged "
    "twice with the same personal fit (both as first submitted, even if taken back later); chose_a of chose, "
    "chose_a_p: response A was preferred, and the exact two-sided p-value under a fair coin",
    "adjudication": "items on whose personal fit the annotators disagree, whose majority differs from the label, or "
    "whose ratings differ by three points or more; dispute: share of the smaller side",
}


def audit_report(folder: str | Path, *, out: str | Path | None = None) -> dict[str, Any]:
    """Compute the figures of an audit so far, and write them to ``report.json`` in its folder.

    The audit may be running.

    Args:
      folder: Folder of the audit.
      out: Page to write, with a name that ends in .html; an existing page is replaced.

    Returns:
      Contents of ``report.json``; "definitions" explains the other fields, and "sentence" is text for a paper.

    Raises:
      RunError: there is no audit, it was changed by hand, or the report or the page cannot be written.
      DataError: the data changed since the audit began.
    """
    if out is not None:
        check_page(out)
    state = read_state(folder)
    inputs = state.folder.inputs
    table = make_table(state)
    report: dict[str, Any] = {
        "audit": state.folder.id,
        "items": sum(item.kind == "item" for item in state.items),
        "judged": len(table.rows),
        "complete": sum(len(row) >= inputs["per_item"] for row in table.rows),
        "per_item": inputs["per_item"],
        "judgements": sum(len(row) for row in table.rows),
        "checks": len(state.checks),
        "taken_back": state.taken_back,
        "over": table.over,
        "margin": inputs["margin"],
        "fit": fit_figures(table, seed=inputs["seed"]),
        "quality": quality_figures(table, margin=inputs["margin"], seed=inputs["seed"]),
        "annotators": [
            attention_figures(state, name)
            for name in dict.fromkeys(judged.annotator for judged in state.judged)
        ],
        "adjudication": adjudication_queue(table),
    }
    report["sentence"] = sentence(report)
    report["definitions"] = dict(DEFINITIONS)
    write_json(Path(folder) / REPORT, report)
    if out is not None:
        write_page([audit_chapter(report)], out=out, title=f"Audit: {Path(folder).resolve().name}")
    return report


def sentence(report: Mapping[str, Any]) -> str:
    """Return a few sentences for a paper that claim no more than the figures of a report show."""
    if not report["judgements"]:
        return "Nobody has judged anything yet."
    people = sum(person["judgements"] > 0 for person in report["annotators"])
    planned = f"{report['complete']:,} of {report['items']:,} pairs have the planned {report['per_item']} judgements"
    parts = [
        f"Preliminary: {planned}." if report["complete"] < report["items"] else "",
        f"{counted(people, 'annotator')} judged {report['judged']:,} pairs "
        f"({report['judgements']:,} judgements), blind to the labels and in random order of the two responses.",
        _fit(report),
        _agreement(report),
        _quality(report),
        _attention(report),
    ]
    return " ".join(filter(None, parts))


def _fit(report: Mapping[str, Any]) -> str:
    label = report["fit"]["label"]
    if label["value"] is None:
        return "No judgement names the response that fits the person."
    share, unknown = _shown(label, report, "{:.1f} %", 100), report["fit"]["cannot_tell"]
    text = f"The labelled response was found to fit the person better in {share} of the judgements"
    if unknown:
        text += f" that chose a response ({unknown:,} of {report['judgements']:,} did not)"
    majority = report["fit"]["majority"]
    if majority["value"] is not None:
        text += f", and by the majority for {100 * majority['value']:.1f} % of the {majority['items']:,} pairs with one"
    return text + "."


def _agreement(report: Mapping[str, Any]) -> str:
    agreement = report["fit"]["agreement"]
    if agreement["observed"]["value"] is None:
        return "No pair has two judgements of personal fit, so agreement is unknown."
    named = {"alpha": "Krippendorff's alpha", "fleiss": "Fleiss' kappa", "ac1": "Gwet's AC1"}
    shown = [f"{name} {_shown(agreement[key], report, '{:.2f}')}" for key, name in named.items()]
    return (
        f"Two judgements of personal fit were equal in {100 * agreement['observed']['value']:.1f} % of the cases: "
        f"{', '.join(shown)}."
    )


def _quality(report: Mapping[str, Any]) -> str:
    overall = report["quality"]["overall"]
    if overall["difference"] is None:
        return "No pair has ratings of both responses."
    text = f"In general quality (1 to 5), the chosen response was rated {overall['difference']:+.2f} points"
    if overall["ci90"] is None:
        return f"{text} against the rejected one; equivalence cannot be tested ({overall['reason']})."
    low, high = overall["ci90"]
    text += f" against the rejected one (90 % interval over {report['over']} {low:+.2f} to {high:+.2f}), "
    p = "< 0.001" if overall["p"] < 0.001 else f"= {overall['p']:.3f}"
    margin = f"within {report['margin']:g} points (two one-sided t tests, p {p})"
    if overall["equivalent"]:
        return f"{text}equivalent {margin}."
    return f"{text}which is not shown to be equivalent {margin}."


def _attention(report: Mapping[str, Any]) -> str:
    totals = {
        name: sum(person[name] for person in report["annotators"])
        for name in ("gold_right", "gold", "again_same", "again")
    }
    parts = []
    if totals["gold"]:
        parts.append(f"{totals['gold_right']} of {totals['gold']} attention checks were passed")
    if totals["again"]:
        parts.append(f"{totals['again_same']} of {totals['again']} repeated judgements were the same")
    if not parts:
        return "There were no attention checks."
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _shown(figure: Mapping[str, Any], report: Mapping[str, Any], form: str, scale: float = 1.0) -> str:
    """Format a figure with its interval: over annotators too if there is one, else for these annotators."""
    if figure["value"] is None:
        return f"not defined ({figure['reasons']['value']})"
    text, over = form.format(scale * figure["value"]), report["over"]
    bounds = figure["ci95"]
    if figure.get("ci95_annotators") is not None:
        bounds, over = figure["ci95_annotators"], f"{over} and annotators"
    if bounds is None:
        return text
    low, high = (form.removesuffix(" %").format(scale * end) for end in bounds)
    return f"{text} (95 % interval over {over} {low} to {high})"
