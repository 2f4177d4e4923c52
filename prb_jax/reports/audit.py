"""The report of an audit on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prb_jax.errors import listed
from prb_jax.reports.style import NONE, facts_table, new_table, signed
from prb_jax.reports.tables import interval

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN = 10
_COEFFICIENTS = {
    "alpha": "Krippendorff's alpha",
    "fleiss": "Fleiss' kappa",
    "ac1": "Gwet's AC1",
    "observed": "equal judgements",
}


def render_audit(report: Mapping[str, Any]) -> Group:
    """Return tables of what `prb_jax.auditing.report.audit_report` gives, and the sentence for a paper."""
    from rich.console import Group
    from rich.text import Text

    facts = facts_table(
        [
            ("pairs", f"{report['items']:,}"),
            ("complete", f"{report['complete']:,}, with {report['per_item']} judgements each"),
            ("judged", f"{report['judged']:,}, with {report['judgements']:,} judgements"),
            ("checks", f"{report['checks']:,}"),
            ("taken back", f"{report['taken_back']:,}"),
        ],
        title="Audit",
    )
    parts = [facts, _fit(report), *_pairs(report), _quality(report), _annotators(report), *_queue(report)]
    return Group(*parts, Text("For a paper", style="bold"), Text(report["sentence"]))


def _fit(report: Mapping[str, Any]) -> Any:
    fit = report["fit"]
    over = report["over"]
    table = new_table("Personal fit", ["", f"over {over}", f"over {over} and annotators"])
    shown = {name: fit["agreement"][key] for key, name in _COEFFICIENTS.items()}
    shown |= {"the label": fit["label"], "the label, by majority": fit["majority"]}
    for name, figure in shown.items():
        both = figure.get("ci95_annotators")
        table.add_row(
            name,
            interval(figure["value"], figure["ci95"]),
            NONE if both is None else interval(figure["value"], both),
        )
    reasons = {reason for figure in shown.values() for reason in figure["reasons"].values()}
    if reasons:
        table.caption = f"{NONE}: {listed(sorted(reasons))}"
    return table


def _pairs(report: Mapping[str, Any]) -> list[Any]:
    pairs = report["fit"]["cohen"]["pairs"]
    if not pairs:
        return []
    from rich.markup import escape

    table = new_table("Cohen's kappa", ["annotators", "items", f"over {report['over']}"])
    for pair in pairs[:_SHOWN]:
        name = escape(f"{pair['a']}, {pair['b']}")
        table.add_row(name, str(pair["items"]), interval(pair["value"], pair["ci95"]))
    mean = report["fit"]["cohen"]["mean"]
    table.add_row(f"mean of {len(pairs)}", "", interval(mean, None))
    return [table]


def _quality(report: Mapping[str, Any]) -> Any:
    quality = report["quality"]
    headings = ["", "alpha", "chosen - rejected", "p (TOST)", "equivalent"]
    table = new_table(f"General quality, margin {report['margin']:g}", headings)
    for name, figures in {"overall": quality["overall"], **quality["criteria"]}.items():
        alpha = figures.get("alpha")
        p, equivalent = figures["p"], figures["equivalent"]
        table.add_row(
            name,
            "" if alpha is None else interval(alpha["value"], alpha["ci95"]),
            signed(figures["difference"], figures["ci90"]),
            NONE if p is None else f"{p:.4f}",
            NONE if equivalent is None else "yes" if equivalent else "not shown",
        )
    table.caption = "alpha: 95 % intervals, differences: 90 %"
    return table


def _annotators(report: Mapping[str, Any]) -> Any:
    from rich.markup import escape

    headings = ["annotator", "judgements", "can't tell", "gold", "same again", "chose A", "seconds"]
    table = new_table("Annotators", headings)
    for each in report["annotators"]:
        table.add_row(
            escape(each["name"]),
            str(each["judgements"]),
            str(each["cannot_tell"]),
            _of(each["gold_right"], each["gold"]),
            _of(each["again_same"], each["again"]),
            _of(each["chose_a"], each["chose"]),
            f"{each['median_seconds']:.0f}",
        )
    return table


def _queue(report: Mapping[str, Any]) -> list[Any]:
    queue = report["adjudication"]
    if not queue:
        return []
    from rich.markup import escape

    table = new_table(f"To adjudicate: {len(queue):,}", ["id", "why"], left=2)
    for each in queue[:_SHOWN]:
        table.add_row(escape(each["id"]), escape(listed(each["reasons"], most=2)))
    if len(queue) > _SHOWN:
        table.caption = f"and {len(queue) - _SHOWN:,} more in report.json"
    return [table]


def _of(count: int, total: int) -> str:
    return f"{count} of {total}" if total else NONE
