"""The report of an audit on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prb_jax.errors import counted, listed
from prb_jax.reports.forest import Estimate, draw_forest
from prb_jax.reports.page import Block, Chapter, Listing, Paragraph, Section
from prb_jax.reports.table import (
    NONE,
    Table,
    bounded,
    change,
    facts_table,
    field,
    first_words,
    gained,
    percent,
    signed,
)

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN = 10
_SHOWN_ON_A_PAGE = 200
_COEFFICIENTS = {
    "alpha": "Krippendorff's alpha",
    "fleiss": "Fleiss' kappa",
    "ac1": "Gwet's AC1",
    "observed": "equal judgements",
}
_EQUIVALENT = {None: NONE, True: "yes", False: "not shown"}
_LEGEND = (
    "Personal fit: which of the two responses suits this person better, judged with the profile at hand.",
    "The label: the response that the data call the chosen one. Annotators do not see it.",
    "Krippendorff's alpha, Fleiss' kappa and Gwet's AC1: agreement beyond chance. 1 is full agreement, 0 is guessing.",
    "General quality: ratings from 1 to 5 of correctness, relevance and helpfulness, without the profile. A sound "
    "benchmark has no difference between chosen and rejected responses.",
    "Equivalent: the data show that the difference is smaller than the margin, by two one-sided t tests.",
)


def audit_chapter(report: Mapping[str, Any]) -> Chapter:
    """Return the chapter of a page: the answer, pictures of it, sentences for a paper, and tables."""
    over = report["over"]
    label = {"each judgement": report["fit"]["label"], "the majority of each pair": report["fit"]["majority"]}
    agreement = {
        name: report["fit"]["agreement"][key] for key, name in _COEFFICIENTS.items() if key != "observed"
    }
    opening = [
        *_draw(
            "How often annotators find that the labelled response fits the person better",
            label,
            reference=("chance 0.5", 0.5),
            what="share",
            over=over,
        ),
        *_draw(
            "How well annotators agree with each other",
            agreement,
            reference=("guessing", 0.0),
            what="coefficient",
            over=over,
        ),
    ]
    differences = {"overall": report["quality"]["overall"], **report["quality"]["criteria"]}
    lines = [
        Estimate(name, one["difference"], one["ci90"], remark=_verdict(one, report["margin"]))
        for name, one in differences.items()
        if one["difference"] is not None
    ]
    if lines:
        title = "General quality: rating of the chosen response minus rating of the rejected one"
        drawn = {"figure": signed, "what": "difference of ratings", "line": f"90 % interval over {over}"}
        opening.append(draw_forest(title, lines, reference=("no difference", 0.0), **drawn))
    opening.append(Listing("How to read these figures", _LEGEND))
    definitions = [f"{name}: {meaning}." for name, meaning in report["definitions"].items()]
    sections = [
        Section("For a paper", [Paragraph(report["sentence"])]),
        Section("Figures", [*_tables(report, most=_SHOWN_ON_A_PAGE), Listing("Definitions", definitions)]),
    ]
    return Chapter("The audit", "audit", _answer(report), opening, sections)


def _answer(report: Mapping[str, Any]) -> str:
    """Return in one sentence whether people confirm the labels, agree, and find both responses equally good."""
    if not report["judgements"]:
        return "Nobody has judged anything yet."
    label, alpha, overall = (
        report["fit"]["label"],
        report["fit"]["agreement"]["alpha"],
        report["quality"]["overall"],
    )
    people = sum(person["judgements"] > 0 for person in report["annotators"])
    parts = [
        f"{counted(people, 'annotator')} judged {report['judged']:,} of {counted(report['items'], 'pair')}"
    ]
    if label["value"] is not None:
        share = percent(label["value"], _widest(label))
        parts.append(f"the labelled response fits the person better in {share} of their judgements")
    if alpha["value"] is not None:
        parts.append(f"their agreement is {alpha['value']:.2f} (Krippendorff's alpha)")
    if overall["difference"] is not None:
        rated = gained(overall["difference"], overall["ci90"])
        verdict = _verdict(overall, report["margin"])
        parts.append(f"its general quality differs by {rated} points from the other response's, {verdict}")
    return f"{'; '.join(parts)}."


def _verdict(quality: Mapping[str, Any], margin: float) -> str:
    if quality["equivalent"] is None:
        return "equivalence cannot be tested"
    return (
        f"{'equivalent' if quality['equivalent'] else 'not shown to be equivalent'} within {margin:g} points"
    )


def _widest(figure: Mapping[str, Any]) -> Sequence[float] | None:
    """Return the interval over annotators too if there is one, otherwise the interval for these annotators."""
    return figure.get("ci95_annotators") or figure["ci95"]


def _draw(
    title: str,
    figures: Mapping[str, Mapping[str, Any]],
    *,
    reference: tuple[str, float],
    what: str,
    over: str,
) -> list[Block]:
    """Draw figures with their intervals over annotators too, if there are any; nothing if all are undefined."""
    both = any(one.get("ci95_annotators") for one in figures.values())
    lines = [
        Estimate(
            name,
            one["value"],
            _widest(one),
            remark=f"interval over {over} only" if both and not one.get("ci95_annotators") else "",
        )
        for name, one in figures.items()
        if one["value"] is not None
    ]
    line = f"95 % interval over {over}{' and annotators' if both else ''}"
    return [draw_forest(title, lines, reference=reference, what=what, line=line)] if lines else []


def render_audit(report: Mapping[str, Any]) -> Group:
    """Return the sentence for a paper, and tables, of the result of `prb_jax.building.auditing.report.audit_report`."""
    from rich.console import Group
    from rich.text import Text

    tables = _tables(report, most=_SHOWN)
    return Group(Text("For a paper", style="bold"), Text(report["sentence"]), *tables)


def _tables(report: Mapping[str, Any], *, most: int) -> list[Table]:
    """Return the tables of an audit, with at most so many rows for pairs of annotators and items to adjudicate."""
    facts = {
        "pairs": f"{report['items']:,}",
        "complete": f"{report['complete']:,}, with {report['per_item']} judgements each",
        "judged": f"{report['judged']:,}, with {report['judgements']:,} judgements",
        "checks": f"{report['checks']:,}",
        "taken back": f"{report['taken_back']:,}",
    }
    tables = [facts_table(facts.items(), title="Audit"), _fit(report), _quality(report), _annotators(report)]
    over, cohen, queue = f"over {report['over']}", report["fit"]["cohen"], report["adjudication"]
    if pairs := cohen["pairs"]:
        columns = {
            "annotators": lambda pair: (
                f"{pair['a']}, {pair['b']}" if "a" in pair else f"mean of {len(pairs)}"
            ),
            "items": lambda pair: str(pair.get("items", "")),
            over: bounded("value", "ci95"),
        }
        tables.insert(2, Table.of("Cohen's kappa", [*pairs[:most], {"value": cohen["mean"]}], columns))
    if queue:
        columns = {
            "question": lambda entry: first_words(entry["question"], most=40) or entry["id"],
            "id": field("id"),
            "why": lambda entry: listed(entry["reasons"], most=2),
        }
        more = f"and {len(queue) - most:,} more in report.json" if len(queue) > most else ""
        title = f"To adjudicate: {len(queue):,}"
        tables.append(Table.of(title, queue[:most], columns, words=3, note=more))
    return tables


def _fit(report: Mapping[str, Any]) -> Table:
    fit, over = report["fit"], report["over"]
    rows = [{"name": name, **fit["agreement"][key]} for key, name in _COEFFICIENTS.items()]
    rows += [{"name": "the label", **fit["label"]}, {"name": "the label, by majority", **fit["majority"]}]
    both = bounded("value", "ci95_annotators")
    columns = {
        "": field("name"),
        f"over {over}": bounded("value", "ci95"),
        f"over {over} and annotators": lambda row: both(row) if row.get("ci95_annotators") else NONE,
    }
    reasons = sorted({reason for row in rows for reason in row["reasons"].values()})
    return Table.of("Personal fit", rows, columns, note=f"{NONE}: {listed(reasons)}" if reasons else "")


def _quality(report: Mapping[str, Any]) -> Table:
    alpha = bounded("value", "ci95")
    columns = {
        "": field("name"),
        "alpha": lambda row: alpha(row["alpha"]) if "alpha" in row else "",
        "chosen - rejected": change("difference", "ci90"),
        "p (TOST)": field("p", "{:.4f}"),
        "equivalent": lambda row: _EQUIVALENT[row["equivalent"]],
    }
    quality = {"overall": report["quality"]["overall"], **report["quality"]["criteria"]}
    rows = [{"name": name, **figures} for name, figures in quality.items()]
    note = "alpha: 95 % intervals, differences: 90 %"
    return Table.of(f"General quality, margin {report['margin']:g}", rows, columns, note=note)


def _annotators(report: Mapping[str, Any]) -> Table:
    def share(count: str, total: str) -> Any:
        return lambda row: f"{row[count]} of {row[total]}" if row[total] else NONE

    columns = {
        "annotator": field("name"),
        "judgements": field("judgements"),
        "can't tell": field("cannot_tell"),
        "gold": share("gold_right", "gold"),
        "same again": share("again_same", "again"),
        "chose A": share("chose_a", "chose"),
        "seconds": field("median_seconds", "{:.0f}"),
    }
    return Table.of("Annotators", report["annotators"], columns)
