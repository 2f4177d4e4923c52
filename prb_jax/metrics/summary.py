"""The summary of a run: every aggregate, recomputed from the scored rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import Outcomes, ScoredRow, group_counts, outcomes
from prb_jax.metrics.uncertainty import binomial_p_values, bootstrap_interval, paired_difference

LENGTH_BASELINE: Final = "baseline:length"
NO_SUBSET: Final = "(no subset)"
COVERAGE_LEVEL: Final = 0.05

DEFINITIONS: Final[Mapping[str, str]] = {
    "n": "scored comparisons",
    "accuracy": "strict wins / n: the best score among the highest labels is above the best of the others; "
    "a tie is not a win",
    "ci95": "95 % percentile bootstrap over users (a row without a user is a cluster of its own); "
    "null with fewer than two clusters",
    "ties": "comparisons in which those two scores are equal",
    "mean_margin": "mean of the best score among the highest labels minus the best of the others",
    "accuracy_by_subset": "the accuracy within each subset",
    "by_subset": "n, accuracy, ci95 and ties within each subset",
    "users": "distinct users; rows without a user do not enter the user figures",
    "users_testable": "users with enough rows (5 or more) to be covered at all",
    "user_accuracy": "mean over users of each user's accuracy",
    "user_accuracy_ci95": "95 % percentile bootstrap over users",
    "coverage": "share of users whose accuracy is above 0.5 by a one-sided exact binomial test at 0.05",
    "truncated": "comparisons of which any text was cut",
    "truncation": "how much was cut in all, by kind",
    "length_baseline": "accuracy of always preferring the longest response (characters), same rows",
    "baselines": "the same figures for each baseline; difference = accuracy minus the baseline's, paired",
}
"""What each key of a summary means; written into the file beside the numbers."""


def summarise(
    rows: Sequence[ScoredRow],
    *,
    baselines: Mapping[str, Sequence[ScoredRow]] | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> dict[str, Any]:
    """All figures of one run, as plain JSON values (None where a figure does not exist, never NaN).

    Args:
      rows: the scored comparisons, each once; their order does not matter.
      baselines: by name, the rows of each baseline on the same comparisons. "baseline:length"
        among them gives ``length_baseline``.
      seed: of the bootstrap.
      resamples: of the bootstrap.

    Returns:
      A dict with the keys of ``DEFINITIONS``, which explains them, and "definitions".

    Raises:
      DataError: without rows; for a row whose scores are not finite or whose labels prefer
        nothing; for a baseline on other comparisons.
    """
    summary = _figures(rows, seed=seed, resamples=resamples)
    compared: dict[str, Any] = {}
    for name, baseline_rows in (baselines or {}).items():
        difference = paired_difference(rows, baseline_rows, seed=seed, resamples=resamples)
        figures = _figures(baseline_rows, seed=seed, resamples=resamples)
        for key in ("truncated", "truncation"):  # a baseline reads the whole text
            del figures[key]
        compared[name] = figures | {
            "difference": difference["difference"],
            "difference_ci95": difference["ci95"],
        }
    length = compared.get(LENGTH_BASELINE)
    summary["length_baseline"] = None if length is None else length["accuracy"]
    summary["baselines"] = compared
    summary["definitions"] = dict(DEFINITIONS)
    return summary


def _figures(rows: Sequence[ScoredRow], *, seed: int, resamples: int) -> dict[str, Any]:
    if not rows:
        raise DataError("no scored comparisons to summarise")
    result = outcomes(rows)
    users = [row.user_id for row in rows]
    figures = _accuracy(result, users, seed=seed, resamples=resamples)
    # exact sums here and below: not even the last bit depends on the order of the rows
    figures["mean_margin"] = math.fsum(result.margins) / len(rows)
    by_subset = _by_subset(rows, result, seed=seed, resamples=resamples)
    figures["accuracy_by_subset"] = {name: part["accuracy"] for name, part in by_subset.items()}
    figures["by_subset"] = by_subset
    figures |= _users(result, users, seed=seed, resamples=resamples)
    figures["truncated"] = sum(row.is_truncated for row in rows)
    figures["truncation"] = _truncation(rows)
    return figures


def _accuracy(result: Outcomes, users: Sequence[str | None], *, seed: int, resamples: int) -> dict[str, Any]:
    counts = group_counts(result.wins, users)
    return {
        "n": len(result.wins),
        "accuracy": float(result.wins.mean()),
        "ci95": bootstrap_interval(counts.wins, counts.rows, seed=seed, resamples=resamples),
        "ties": int(result.ties.sum()),
    }


def _by_subset(rows: Sequence[ScoredRow], result: Outcomes, *, seed: int, resamples: int) -> dict[str, Any]:
    """Figures by subset, sorted by name; empty if no row has a subset."""
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(NO_SUBSET if row.subset is None else row.subset, []).append(i)
    if members.keys() == {NO_SUBSET}:
        return {}
    return {
        name: _accuracy(
            Outcomes(result.wins[index], result.ties[index], result.margins[index]),
            [rows[i].user_id for i in index],
            seed=seed,
            resamples=resamples,
        )
        for name, index in sorted(members.items())
    }


def _users(result: Outcomes, users: Sequence[str | None], *, seed: int, resamples: int) -> dict[str, Any]:
    known = [i for i, user in enumerate(users) if user is not None]
    if not known:
        nothing = dict.fromkeys(("user_accuracy", "user_accuracy_ci95", "coverage"))
        return {"users": 0, "users_testable": 0, **nothing}
    counts = group_counts(result.wins[known], [users[i] for i in known])
    ones = np.ones(len(counts.rows))
    covered = binomial_p_values(counts.wins, counts.rows) <= COVERAGE_LEVEL
    testable = binomial_p_values(counts.rows, counts.rows) <= COVERAGE_LEVEL
    return {
        "users": len(counts.rows),
        "users_testable": int(testable.sum()),
        "user_accuracy": math.fsum(counts.accuracy) / len(counts.rows),
        "user_accuracy_ci95": bootstrap_interval(counts.accuracy, ones, seed=seed, resamples=resamples),
        "coverage": float(covered.mean()),
    }


def _truncation(rows: Sequence[ScoredRow]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in rows:
        if isinstance(row.truncated, Mapping):
            for kind, amount in row.truncated.items():
                totals[kind] = totals.get(kind, 0) + int(amount)
    return dict(sorted(totals.items()))
