"""RM-Bench (arXiv 2410.16184): right and wrong answers in three styles each, compared crosswise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks.benchmark import (
    Benchmark,
    BenchmarkScore,
    Place,
    better_first,
    by_subset,
    check_finite,
    mean,
)

STYLES: Final = ("concise", "detailed", "detailed Markdown")
DOMAINS: Final = ("chat", "math", "code", "safety")
"""A row belongs to the domain that its subset starts with: safety-refuse and safety-response are one."""


def record(row: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The three chosen and then the three rejected answers, each in the order of ``STYLES``."""
    if row.get("responses") is not None:
        return row
    responses = better_first(row, place, better="chosen", worse="rejected")
    for name in ("chosen", "rejected"):
        if len(row[name]) != len(STYLES):
            message = f"expected {len(STYLES)} styles ({', '.join(STYLES)}), found {len(row[name])}"
            fields.fail(place.where, name, message)
    return {"id": row.get("id"), "prompt": row.get("prompt"), "subset": row.get("domain"), **responses}


def wins(row: ScoredRow) -> np.ndarray:
    """bool [3, 3]: whether the chosen answer in style i scores strictly above the rejected one in style j."""
    if list(row.labels) != [1.0] * len(STYLES) + [0.0] * len(STYLES):
        raise DataError(
            f"row {quote(row.id)}: expected {len(STYLES)} chosen and {len(STYLES)} rejected answers, "
            f"found labels {list(row.labels)}"
        )
    check_finite(row)
    scores = np.asarray(row.scores, np.float64)
    return scores[: len(STYLES), None] > scores[None, len(STYLES) :]


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """The mean of the four domains, and the means by difficulty; None where a domain is missing.

    hard: the rejected answer has the richer style; normal: both have the same; easy: the chosen one has.
    """
    members: dict[str, list[ScoredRow]] = {}
    others: list[str] = []
    for subset, part in by_subset(rows).items():
        domain = next((name for name in DOMAINS if subset.startswith(name)), None)
        if domain is None:
            others.append(subset)
        else:
            members.setdefault(domain, []).extend(part)
    domains = {domain: _domain(members[domain]) for domain in DOMAINS if domain in members}
    missing = [domain for domain in DOMAINS if domain not in domains]
    present = {
        name: mean(figures[name] for figures in domains.values())
        for name in ("mean", "hard", "normal", "easy")
    }
    overall = dict.fromkeys(present) if missing else present
    return BenchmarkScore(
        score=overall["mean"],
        figures={
            **{domain: domains[domain]["mean"] if domain in domains else None for domain in DOMAINS},
            **{name: overall[name] for name in ("hard", "normal", "easy")},
        },
        details={"domains": domains, "mean_of_present": present, "other_subsets": sorted(others)},
        missing=missing,
    )


def _domain(rows: Sequence[ScoredRow]) -> dict[str, Any]:
    matrix = np.stack([wins(row) for row in rows]).sum(axis=0) / len(rows)
    richer = np.triu_indices(len(STYLES), 1)  # rejected style j richer than chosen style i
    hard, easy = float(matrix[richer].mean()), float(matrix.T[richer].mean())
    normal = float(np.diagonal(matrix).mean())
    return {
        "items": len(rows),
        "mean": (hard + normal + easy) / 3,
        "hard": hard,
        "normal": normal,
        "easy": easy,
        "matrix": matrix.tolist(),
    }


BENCHMARK = Benchmark(
    name="rm-bench",
    rule="mean over chat, math, code and safety of the mean of hard, normal and easy: strict wins of each "
    "of three chosen styles over each of three rejected ones",
    score=score,
    repository="THU-KEG/RM-Bench",
    splits=("train",),
    record=record,
)
