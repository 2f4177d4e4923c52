"""`prb audit DIR --report`: the figures of an audit so far, and the sentence that may be written in a paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from prb_jax.auditing.figures import (
    adjudication_queue,
    attention_figures,
    fit_figures,
    make_table,
    quality_figures,
)
from prb_jax.auditing.folder import REPORT
from prb_jax.auditing.judged import read_state
from prb_jax.auditing.sentence import sentence
from prb_jax.data.writing import write_json

DEFINITIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "items": "pairs of the audit, without gold items",
        "judged": "items that somebody judged; complete: that as many annotators judged as the audit asks for",
        "over": "what intervals are taken over: the users of the items where every item names one and some share one, "
        "else the items",
        "ci95": "95 % interval over users or items, for these annotators: of coefficients of agreement by the "
        "bootstrap (percentiles of 2,000 resamples), of shares a score interval as in docs/statistics.md",
        "ci95_annotators": "95 % interval over users or items and over annotators at once: of coefficients by the "
        "bootstrap that draws both, where an annotator who is drawn twice is not paired with himself; of shares "
        "two-way clustered",
        "reasons": "why a figure or an interval is null",
        "fit.agreement": "of personal fit; the two categories are the responses in an order that is drawn by lot for "
        "each item (`first` in the export), can't tell is missing: alpha (Krippendorff), fleiss "
        "(Fleiss' kappa), ac1 (Gwet), observed (share of the pairs of judgements of an item that are equal, the mean "
        "over items)",
        "fit.cohen": "Cohen's kappa of every two annotators, of the items that both judged; the mean of these",
        "fit.label": "share of the judgements of personal fit that are the label",
        "fit.majority": "share of the items with a majority whose majority is the label; tied: items without one",
        "quality": "of each criterion, alpha (Krippendorff, ordinal) of the ratings, and the difference",
        "difference": "rating of the chosen response minus that of the rejected one: the mean over items of the means "
        "over annotators; overall: of the mean of the criteria",
        "equivalent": "whether two one-sided t tests show at the level 0.05 that the difference is within the margin, "
        "which was fixed before the first judgement; p: the larger p-value; ci90: the interval that is within the "
        "margin then",
        "annotators": "gold_right of gold: gold items whose personal fit was found; again_same of again: items judged "
        "twice with the same personal fit (both as first submitted, though taken back later); chose_a of chose, "
        "chose_a_p: response A was preferred, and the exact two-sided p-value under a fair coin",
        "adjudication": "items on whose personal fit the annotators disagree, whose majority is not the label, or "
        "whose ratings differ by three points or more; dispute: share of the smaller side",
    }
)


def audit_report(folder: str | Path) -> dict[str, Any]:
    """Compute the figures of an audit so far, and write them to ``report.json`` in its folder.

    The audit may be served meanwhile.

    Args:
      folder: of the audit.

    Returns:
      What ``report.json`` holds; its "definitions" explain the rest, and "sentence" may be written in a paper.

    Raises:
      RunError: there is no audit, it was changed by hand, or the report cannot be written.
      DataError: the data changed since the audit began.
    """
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
        "annotators": attention_figures(state),
        "adjudication": adjudication_queue(table),
    }
    report["sentence"] = sentence(report)
    report["definitions"] = dict(DEFINITIONS)
    write_json(Path(folder) / REPORT, report)
    return report
