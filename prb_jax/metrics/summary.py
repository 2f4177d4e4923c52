"""The summary of a run: every aggregate, recomputed from the scored rows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import Outcomes, group_counts, margin
from prb_jax.metrics.clusters import OVER_COMPARISONS, OVER_DERIVED_USERS, OVER_USERS, Clusters
from prb_jax.metrics.coverage import chance, coverage
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import (
    accuracy_interval,
    difference_of_wins,
    grade_interval,
    match_rows,
)

LENGTH_BASELINE: Final = "baseline:length"
NO_SUBSET: Final = "(no subset)"
ITSELF: Final = "the model is this baseline"

_SCORE: Final = (
    "a score interval: the means from which the accuracy is at most t standard errors away, each with the standard "
    "error of a beta-binomial distribution with this mean and the most likely correlation within {over}"
)
_ONE_OF: Final = {
    OVER_USERS: "a user",
    OVER_DERIVED_USERS: "a derived user",
    OVER_COMPARISONS: "a comparison",
}
_TWO_WAY: Final = (
    "a score interval over {over} and {responses}, because several users judge the same responses: the means from "
    "which the accuracy is at most t standard errors away, each with the standard error that follows from the "
    "correlations of rows of one user and of rows with the same responses"
)
_SERVED_TWO_WAY: Final = (
    "; to the variance over users comes the one over {responses}: that of the mean accuracy of users, times the "
    "squared slope of the coverage in this accuracy (the number of rows of a user of which each alone decides "
    "whether the user is served)"
)
_DEFINITIONS: Final[Mapping[str, str]] = {
    "n": "scored comparisons",
    "accuracy": "strict wins / n: the best score among the highest labels is above the best of the others; "
    "a tie is not a win",
    "ci95": "95 % interval over {over}, {method}; null with fewer than six clusters",
    "ci95_reason": "why ci95 is null; null if there is an interval (likewise for every key that ends in _reason)",
    "ties": "comparisons in which those two scores are equal",
    "half_credit_accuracy": "(strict wins + ties / 2) / n; shown in tables where ties exceed one in a hundred",
    "mean_margin": "mean of the best score among the highest labels minus the best of the others",
    "accuracy_by_subset": "the accuracy within each subset",
    "by_subset": "n, accuracy, ci95, ties and half_credit_accuracy within each subset; null where undefined",
    "users": "distinct users; rows without a user do not enter the user figures",
    "users_derived": "whether the data name no users, and rows whose profiles share a post (connected components "
    "of post ids; of ids and texts for ids that occur with several texts) are taken to be of one user",
    "user_accuracy": "mean over users of each user's accuracy; null without users",
    "user_accuracy_ci95": "95 % interval over {over}, {method}; in it every user counts the same",
    "user_accuracy_ci95_reason": "why user_accuracy_ci95 is null",
    "users_testable": "users who would be served if all their rows were won",
    "coverage": "share of the testable users who are served: whose accuracy is above chance (1/K for one best of K "
    "responses) by a one-sided exact binomial test at 0.05; null if nobody is testable",
    "coverage_reason": "why coverage is null",
    "coverage_ci95": "95 % score interval (Wilson) over the testable users{served}",
    "coverage_ci95_reason": "why coverage_ci95 is null",
    "coverage_by_chance": "the share of testable users who would be served by scores without meaning: the mean size "
    "of the tests",
    "coverage_benjamini_hochberg": "the share served after the correction of Benjamini and Hochberg over the "
    "testable users, at 0.05",
    "crossed": "null where no two users judge the same responses (not looked for in data that are read by windows); "
    "else the number of clusters of responses, and whether a cluster is a whole set of responses or a single one",
    "truncated": "comparisons with any cut text",
    "truncation": "how much was cut in all, by kind",
    "length_baseline": "accuracy of always preferring the longest response (characters), same rows",
    "baselines": "the same figures for each baseline; difference = accuracy minus the baseline's, paired, with a 95 % "
    "t interval {paired} (difference_ci95); null, with the reason in difference_ci95_reason, where one of the two is "
    "not defined or the model is this baseline",
}


def summarise(
    rows: Sequence[ScoredRow],
    *,
    baselines: Mapping[str, Sequence[ScoredRow] | str] | None = None,
    clusters: Clusters | None = None,
    model: str | None = None,
    undefined: str | None = None,
    partial: Collection[str] = (),
) -> dict[str, Any]:
    """Return all figures of one run as plain JSON values (None if a figure does not exist, never NaN).

    Args:
      rows: Scored comparisons, each once, in any order.
      baselines: Each baseline's rows by name, on the same comparisons, or a sentence that explains why the baseline is
        undefined for them. ``length_baseline`` comes from "baseline:length".
      clusters: Clusters of the rows, in their order; by default their users.
      partial: Baselines with rows for only some of the comparisons; their figures, and the difference, are over
        these.
      model: Name of a baseline if the rows belong to it: the difference from itself is undefined.
      undefined: Reason why no figure of the rows is defined; by default the baseline's, if it has one.

    Returns:
      A dict of figures, plus "definitions", which explains each of them.

    Raises:
      DataError: there are no rows; a row has scores that are not finite or labels without a preference; a baseline has
        other comparisons.
    """
    if not rows:
        raise DataError("no scored comparisons to summarise")
    clusters = clusters or Clusters(tuple(row.user_id for row in rows))
    baselines = baselines or {}
    reason = undefined or baselines.get(model or "")
    undefined = reason if isinstance(reason, str) else None
    seen = _go_through(rows)
    summary = _figures(seen, clusters, undefined=undefined)
    compared: dict[str, Any] = {}
    for name, of_baseline in baselines.items():
        none = {"difference": None, "ci95": None}
        if isinstance(of_baseline, str):
            figures = _figures(seen, clusters, undefined=of_baseline)
            difference = none | {"ci95_reason": of_baseline}
        else:
            own_rows, over, wins = rows, clusters, seen.result.wins
            if name in partial:
                positions = {row.id: i for i, row in enumerate(rows)}
                index = [positions[row.id] for row in of_baseline]
                own_rows, over, wins = [rows[i] for i in index], clusters.take(index), wins[index]
            baseline = _go_through(match_rows(own_rows, of_baseline))
            figures = _figures(baseline, over)
            difference = difference_of_wins(wins, baseline.result.wins, over)
            if name == model or undefined is not None:
                difference = none | {"ci95_reason": undefined or ITSELF}
        for key in ("truncated", "truncation", "crossed"):  # baselines read whole texts
            del figures[key]
        named = ("difference", "difference_ci95", "difference_ci95_reason")
        compared[name] = figures | dict(zip(named, difference.values(), strict=True))
    length = compared.get(LENGTH_BASELINE)
    return summary | {
        "length_baseline": None if length is None else length["accuracy"],
        "baselines": compared,
        "definitions": _definitions(clusters),
    }


def _definitions(clusters: Clusters) -> dict[str, str]:
    """Return the meaning of each key of a summary of these rows."""
    over = clusters.over
    score = _SCORE.format(over=_ONE_OF[over])
    if over == OVER_USERS and any(user is None for user in clusters.users):
        over = "users (a row without a user counts as a separate cluster)"
    if clusters.responses is None:
        method, paired, served = score, f"over {over}", ""
    else:
        responses = "sets of responses" if len(clusters.responses[0]) == 1 else "responses"
        method = _TWO_WAY.format(over=over, responses=responses)
        paired = f"over {over} and {responses}"
        served = _SERVED_TWO_WAY.format(responses=responses)
    return {
        key: text.format(over=over, method=method, served=served, paired=paired)
        for key, text in _DEFINITIONS.items()
    }


GRADE_DEFINITIONS: Final[Mapping[str, str]] = {
    "accuracy": "the mean grade of the samples",
    "ci95": "95 % interval over users (what the samples are clustered by; over samples where they name none), two-way "
    "over users and items where several users have one item: of grades of 0 and 1 as of an accuracy, else a t interval",
    "user_accuracy": "the mean over users of their mean grades",
    "user_accuracy_ci95": "95 % t interval over users, two-way over users and items where several users have one item; "
    "in it every user counts the same",
}


def summarise_grades(rows: Sequence[ScoredRow], clusters: Clusters) -> dict[str, Any]:
    """Return the figures of graded rows, at least one, as plain JSON values."""
    grades = np.array([row.scores[0] for row in rows], np.float64)

    def figures(index: Sequence[int]) -> dict[str, Any]:
        interval = grade_interval(grades[index], clusters.take(index))
        return {"n": len(index), "accuracy": float(grades[index].mean()), **interval.to_json()}

    subsets: dict[str, list[int]] = {}
    users: dict[str, list[float]] = {}
    for i, (row, user) in enumerate(zip(rows, clusters.users, strict=True)):
        if row.subset is not None:
            subsets.setdefault(row.subset, []).append(i)
        if user is not None:
            users.setdefault(user, []).append(float(grades[i]))
    summary = {
        **figures(range(len(rows))),
        "by_subset": {name: figures(index) for name, index in sorted(subsets.items())},
        "users": len(users),
        "user_accuracy": None,
        "definitions": dict(GRADE_DEFINITIONS),
    }
    if users:
        known = [i for i, user in enumerate(clusters.users) if user is not None]
        crossed = clusters.take(known)
        means = [math.fsum(values) / len(values) for values in users.values()]
        of_users = grade_interval(grades[known], crossed, per_user=True)
        summary |= {"user_accuracy": float(np.mean(means)), **of_users.to_json("user_accuracy_ci95")}
    return summary


@dataclass(frozen=True)
class _Seen:
    """Inputs of the figures for n rows, which may be created one by one on access."""

    result: Outcomes
    subsets: Sequence[str | None]
    chances: np.ndarray  # [n] probability that random scores win a row
    truncated: int  # number of rows that were cut
    truncation: Mapping[str, int]  # amount cut by kind


def _go_through(rows: Sequence[ScoredRow]) -> _Seen:
    margins, chances, truncated = array("d"), array("d"), 0
    subsets: list[str | None] = []
    totals: dict[str, int] = {}
    for row in rows:
        margins.append(margin(row.scores, row.labels, id=row.id))
        chances.append(chance(row.labels))
        subsets.append(row.subset)
        truncated += row.is_truncated
        if isinstance(row.truncated, Mapping):
            for kind, amount in row.truncated.items():
                totals[kind] = totals.get(kind, 0) + int(amount)
    result = Outcomes(np.array(margins))
    return _Seen(result, subsets, np.array(chances), truncated, dict(sorted(totals.items())))


def _figures(seen: _Seen, clusters: Clusters, *, undefined: str | None = None) -> dict[str, Any]:
    result = seen.result
    figures = _accuracy(result, clusters)
    # exact sums here and below: the result is bit-identical for any order of rows
    figures["mean_margin"] = math.fsum(result.margins) / len(result.margins)
    by_subset, crossed = _by_subset(seen, clusters), None
    if clusters.responses is not None:
        by = "set of responses" if len(clusters.responses[0]) == 1 else "response"
        crossed = {"clusters": len({key for keys in clusters.responses for key in keys}), "by": by}
    figures |= _users(seen, clusters)
    if undefined is not None:
        figures = _undefined(figures, undefined)
        by_subset = {name: _undefined(part, undefined) for name, part in by_subset.items()}
    return figures | {
        "accuracy_by_subset": {name: part["accuracy"] for name, part in by_subset.items()},
        "by_subset": by_subset,
        "crossed": crossed,
        "truncated": seen.truncated,
        "truncation": dict(seen.truncation),
    }


def _undefined(figures: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the same entries with only the numbers of comparisons and users, and the reason."""
    kept = ("n", "users", "users_derived", "users_testable")
    return {
        key: value if key in kept else reason if key.endswith("_reason") else None
        for key, value in figures.items()
    }


def _accuracy(result: Outcomes, clusters: Clusters) -> dict[str, Any]:
    wins, ties, n = int(result.wins.sum()), int(result.ties.sum()), len(result.wins)
    return {
        "n": n,
        "accuracy": wins / n,
        **accuracy_interval(result.wins, clusters).to_json(),
        "ties": ties,
        "half_credit_accuracy": (wins + ties / 2) / n,
    }


def _by_subset(seen: _Seen, clusters: Clusters) -> dict[str, Any]:
    """Figures by subset, sorted by name; empty if no row has a subset."""
    members: dict[str, list[int]] = {}
    margins = seen.result.margins
    for i, subset in enumerate(seen.subsets):
        members.setdefault(NO_SUBSET if subset is None else subset, []).append(i)
    if members.keys() == {NO_SUBSET}:
        return {}
    return {
        name: _accuracy(Outcomes(margins[index]), clusters.take(index))
        for name, index in sorted(members.items())
    }


def _users(seen: _Seen, clusters: Clusters) -> dict[str, Any]:
    known = [i for i, user in enumerate(clusters.users) if user is not None]
    users, wins = [str(clusters.users[i]) for i in known], seen.result.wins[known]
    of_known = clusters.take(known)
    served = coverage(users, wins.tolist(), seen.chances[known].tolist(), responses=of_known.responses)
    counts = group_counts(wins, users)
    figures: dict[str, Any] = {"users": len(counts.rows), "users_derived": clusters.derived}
    if not known:
        reason = served["coverage_reason"]
        none = {"user_accuracy": None, "user_accuracy_ci95": None, "user_accuracy_ci95_reason": reason}
        return figures | none | served
    interval = accuracy_interval(wins, of_known, per_user=True)
    accuracy = math.fsum(counts.accuracy) / len(counts.rows)
    return figures | {"user_accuracy": accuracy, **interval.to_json("user_accuracy_ci95")} | served
