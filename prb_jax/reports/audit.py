"""Terminal report of an audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prb_jax.errors import listed
from prb_jax.reports.table import NONE, Table, bounded, change, facts_table, field, first_words

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN = 10
_COEFFICIENTS = {
    "alpha": "Krippendorff's alpha",
    "fleiss": "Fleiss' kappa",
    "ac1": "Gwet's AC1",
    "observed": "equal judgements",
}
_EQUIVALENT = {None: NONE, True: "yes", False: "not shown"}


def render_audit(report: Mapping[str, Any]) -> Group:
    """Return the sentence for a paper, and tables, of the result of `prb_jax.building.auditing.report.audit_report`."""
    from rich.console import Group
    from rich.text import Text

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
        tables.insert(2, Table.of("Cohen's kappa", [*pairs[:_SHOWN], {"value": cohen["mean"]}], columns))
    if queue:
        columns = {
            "question": lambda entry: first_words(entry["question"], most=40) or entry["id"],
            "id": field("id"),
            "why": lambda entry: listed(entry["reasons"], most=2),
        }
        more = f"and {len(queue) - _SHOWN:,} more in report.json" if len(queue) > _SHOWN else ""
        title = f"To adjudicate: {len(queue):,}"
        tables.append(Table.of(title, queue[:_SHOWN], columns, words=3, note=more))
    return Group(Text("For a paper", style="bold"), Text(report["sentence"]), *tables)


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
