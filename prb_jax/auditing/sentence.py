"""What may be written in a paper about an audit: no more than its figures show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sentence(report: Mapping[str, Any]) -> str:
    """Return a few sentences about an audit.

    Args:
      report: what `prb_jax.auditing.report.audit_report` gives, without these sentences.
    """
    if not report["judgements"]:
        return "Nobody has judged anything yet."
    people = sum(each["judgements"] > 0 for each in report["annotators"])
    planned = f"{report['complete']:,} of {report['items']:,} pairs have the planned {report['per_item']} judgements"
    parts = [
        f"Preliminary: {planned}." if report["complete"] < report["items"] else "",
        f"{people} annotator{'s' if people > 1 else ''} judged {report['judged']:,} pairs "
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
        return "No judgement tells which response fits the person."
    unknown = report["fit"]["cannot_tell"]
    text = f"The labelled response was found to fit the person better in {_percent(label, report)} of the judgements"
    if unknown:
        text += f" that could tell ({unknown:,} of {report['judgements']:,} could not)"
    majority = report["fit"]["majority"]
    if majority["value"] is not None:
        text += f", and by the majority for {100 * majority['value']:.1f} % of the {majority['items']:,} pairs with one"
    return text + "."


def _agreement(report: Mapping[str, Any]) -> str:
    found = report["fit"]["agreement"]
    if found["observed"]["value"] is None:
        return "No pair has two judgements of personal fit, so that nothing is known about agreement."
    named = {"alpha": "Krippendorff's alpha", "fleiss": "Fleiss' kappa", "ac1": "Gwet's AC1"}
    shown = [f"{name} {_figure(found[key], report)}" for key, name in named.items()]
    return (
        f"Two judgements of personal fit were equal in {100 * found['observed']['value']:.1f} % of the cases: "
        f"{', '.join(shown)}."
    )


def _quality(report: Mapping[str, Any]) -> str:
    found = report["quality"]["overall"]
    if found["difference"] is None:
        return "No pair has ratings of both responses."
    text = f"In general quality (1 to 5), the chosen response was rated {found['difference']:+.2f} points"
    if found["ci90"] is None:
        return f"{text} against the rejected one; equivalence cannot be tested ({found['reason']})."
    low, high = found["ci90"]
    text += f" against the rejected one (90 % interval over {report['over']} {low:+.2f} to {high:+.2f}), "
    margin = f"within {report['margin']:g} points (two one-sided t tests, p {_p(found['p'])})"
    if found["equivalent"]:
        return f"{text}equivalent {margin}."
    return f"{text}which is not shown to be equivalent {margin}."


def _attention(report: Mapping[str, Any]) -> str:
    totals = {
        name: sum(each[name] for each in report["annotators"])
        for name in ("gold_right", "gold", "again_same", "again")
    }
    parts = []
    if totals["gold"]:
        parts.append(f"{totals['gold_right']} of {totals['gold']} attention checks were passed")
    if totals["again"]:
        parts.append(
            f"{totals['again_same']} of {totals['again']} judgements that were asked for again were the same"
        )
    if not parts:
        return "There were no attention checks."
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _percent(figure: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    name, over = _widest(figure, report)
    if name is None:
        return f"{100 * figure['value']:.1f} %"
    low, high = figure[name]
    return f"{100 * figure['value']:.1f} % (95 % interval over {over} {100 * low:.1f} to {100 * high:.1f})"


def _figure(figure: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    if figure["value"] is None:
        return f"not defined ({figure['reasons']['value']})"
    name, over = _widest(figure, report)
    if name is None:
        return f"{figure['value']:.2f}"
    low, high = figure[name]
    return f"{figure['value']:.2f} (95 % interval over {over} {low:.2f} to {high:.2f})"


def _widest(figure: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str | None, str]:
    """The interval over annotators too where there is one, else the one for these annotators."""
    if figure.get("ci95_annotators") is not None:
        return "ci95_annotators", f"{report['over']} and annotators"
    return ("ci95" if figure.get("ci95") is not None else None), report["over"]


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
