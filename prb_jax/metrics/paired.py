"""Several models on the same comparisons: paired differences, exact tests, and statistically distinct ranks.

Also tests whether a mean difference is negligible, by two one-sided tests (TOST, Schuirmann 1987), and computes the
difference that a test would have detected, by the noncentral t distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.calibration import log_losses
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import (
    Interval,
    difference_interval,
    grade_interval,
    loss_interval,
    mean_interval,
)

LEVEL: Final = 0.05
POWER: Final = 0.8
HALF, LOSS = TIES = ("half", "loss")
"""Value of a tie in ranks and differences."""

COMPARISON_DEFINITIONS: Final[Mapping[str, str]] = {
    "accuracy": "strict wins / n; a tie is not a win. Of the graded rows of another harness: their mean grade",
    "ties": "comparisons in which the two compared scores are equal",
    "half_credit_accuracy": "(strict wins + ties / 2) / n",
    "tie_credit": "value of a tie in ranks and differences: 0.5, so coarse scores do not rank below fine ones; 0 "
    "with --ties loss",
    "ci95": "95 % interval over users (over comparisons where the data name no users), two-way over users and "
    "responses where several users judge the same responses: of an accuracy as in summary.json, of a difference a t "
    "interval; null where there are fewer than six clusters",
    "rank_group": "1 for the best. The runs stand in the order of accuracy, ties counted by tie_credit, and a new "
    "group begins with the first run that the data tell apart from one of the group before it. Two runs are told apart "
    "if p_holm is at most 0.05; with fewer than six clusters none are",
    "difference": "accuracy of a minus accuracy of b on the same comparisons, ties counted by tie_credit",
    "detectable": "the smallest true difference that the test of this one pair would have found, at 0.05 and before "
    "the adjustment, with a power of 80 %: by the noncentral t distribution with the standard error of the interval",
    "log_loss": "with --log-loss: the mean of minus the logarithm of the softmax of the scores on the preferred "
    "response. log_loss_difference: that of a minus that of b, with its interval, p and Holm's p; below 0 a is better",
    "p": "two-sided t test of the difference, with the standard error and the degrees of freedom of its interval; null "
    "where there is none",
    "p_holm": "p adjusted for all pairs by the method of Holm (1979)",
    "p_mcnemar": "two-sided exact McNemar test: how often only one of the two wins, against an even split. It takes "
    "comparisons of one user for independent, and decides nothing here. Of graded rows: how often either has the "
    "higher grade",
    "n": "comparisons",
    "users": "distinct users among them",
    "flips": "comparisons whose verdict (win, tie, loss; the grade, of graded rows) differs between a and b",
    "scores": "of every response, the score by a minus the score by b: mean, rms (root mean square), max_abs; std_b, "
    "the standard deviation of the scores by b; Pearson and Spearman correlation of the two (null where either is "
    "constant)",
}
"""Meaning of the figures of a comparison."""


def mcnemar_p(only_a: np.ndarray | int, only_b: np.ndarray | int) -> np.ndarray:
    """Return two-sided exact p-values of McNemar's test (McNemar 1947, the binomial form).

    The arguments count the comparisons that only the first, and only the second, of two models wins. The p-value is
    twice P(X <= the smaller) for X ~ Binomial(sum, 1/2), at most 1.
    """
    from scipy.special import bdtr  # scipy is slow to import

    a, b = np.asarray(only_a, np.int64), np.asarray(only_b, np.int64)
    return np.minimum(2 * bdtr(np.minimum(a, b).astype(np.float64), a + b, 0.5), 1.0)


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return [M] p-values adjusted by the step-down method of Holm (1979), in the order of ``p_values``."""
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def compare_rows(
    runs: Mapping[str, Sequence[ScoredRow]],
    *,
    clusters: Clusters | None = None,
    ties: str = HALF,
    log_loss: bool = False,
) -> dict[str, Any]:
    """Compare every two of several models that scored the same comparisons.

    Args:
      runs: Rows of each model by name; two or more, each comparison once, in any order.
      clusters: Clusters of the rows of the first run, in their order; by default their users.
      ties: One of `TIES`: a tie counts as half a win in ranks and differences, or as a loss.
      log_loss: Also compare log-losses; requires scores that are log-odds.

    Returns:
      {"runs": [{name, accuracy, ci95, ties, half_credit_accuracy, rank_group}] from the best to the worst,
       "pairs": [{"a", "b", "difference", "ci95", "detectable", "p", "p_holm", "p_mcnemar", "n", "users", "flips",
       "scores"}] in the order of "runs",
       "tie_credit": 0.5 or 0},
       with ``log_loss`` also "log_loss" and "log_loss_ci95" of runs, and "log_loss_difference", "log_loss_ci95",
       "log_loss_p" and "log_loss_p_holm" of pairs,
      plain JSON values, as ``COMPARISON_DEFINITIONS`` explains them.

    Raises:
      DataError: there are fewer than two runs, or the runs differ in their comparisons, users or labels.
    """
    if len(runs) < 2:
        raise DataError(f"runs: expected at least two to compare, found {len(runs)}")
    if ties not in TIES:
        raise DataError(f"ties: expected one of {', '.join(TIES)}, found {quote(ties)}")
    tie_credit = 0.5 if ties == HALF else 0.0
    matched, users = _matched(runs)
    clusters = clusters or Clusters(tuple(users))
    known = len({user for user in clusters.users if user is not None})
    credits = {name: run.grades + tie_credit * run.ties for name, run in matched.items()}
    names = sorted(runs, key=lambda name: (-credits[name].sum(), name))
    bounded = all(run.grades.min() >= 0 and run.grades.max() <= 1 for run in matched.values())
    pairs = []
    for a, b in itertools.combinations(names, 2):
        gains = credits[a] - credits[b]
        interval = (
            difference_interval(gains, clusters)
            if bounded
            else mean_interval(gains, clusters.users, responses=clusters.responses)
        )
        pairs.append(
            {
                "a": a,
                "b": b,
                "difference": float(gains.mean()),
                "ci95": interval.bounds,
                "detectable": _detectable(interval),
                "p": interval.p_value(float(gains.mean())),
                "p_holm": None,
                "p_mcnemar": float(mcnemar_p(int((gains > 0).sum()), int((gains < 0).sum()))),
                "n": len(gains),
                "users": known,
                "flips": int((matched[a].verdicts != matched[b].verdicts).sum()),
                "scores": _score_differences(matched[a].scores, matched[b].scores),
            }
        )
    add_holm(pairs)
    apart = {
        (pair["a"], pair["b"]) for pair in pairs if pair["p_holm"] is not None and pair["p_holm"] <= LEVEL
    }
    groups = _rank_groups(names, apart)
    standings = [
        {
            "name": name,
            "accuracy": float(matched[name].grades.mean()),
            "ci95": grade_interval(matched[name].grades, clusters).bounds,
            "ties": int(matched[name].ties.sum()),
            "half_credit_accuracy": float((matched[name].grades + matched[name].ties / 2).mean()),
            "rank_group": groups[name],
        }
        for name in names
    ]
    if log_loss:
        _add_log_losses(standings, pairs, matched, clusters)
    return {"runs": standings, "pairs": pairs, "tie_credit": tie_credit}


def add_holm(rows: Sequence[dict[str, Any]], *, p: str = "p") -> None:
    """Add to each row with a p-value the Holm-adjusted value over all these rows, as ``p`` with "_holm"."""
    tested = [row for row in rows if row[p] is not None]
    for row, adjusted in zip(tested, holm([row[p] for row in tested]), strict=True):
        row[f"{p}_holm"] = float(adjusted)


def _add_log_losses(
    standings: Sequence[dict[str, Any]],
    pairs: Sequence[dict[str, Any]],
    runs: Mapping[str, _Run],
    clusters: Clusters,
) -> None:
    losses = {}
    for name, run in runs.items():
        if run.rows[0].is_graded:
            raise DataError(f"{name}: has grades, and no scores of several responses; log-losses need scores")
        losses[name] = log_losses(run.rows)
    for run in standings:
        own = losses[run["name"]]
        run |= {"log_loss": float(own.mean()), "log_loss_ci95": loss_interval(own, clusters).bounds}
    for pair in pairs:
        change = losses[pair["a"]] - losses[pair["b"]]
        interval = mean_interval(change, clusters.users, responses=clusters.responses)
        mean = float(change.mean())
        pair |= {"log_loss_difference": mean, "log_loss_ci95": interval.bounds}
        pair |= {"log_loss_p": interval.p_value(mean), "log_loss_p_holm": None}
    add_holm(pairs, p="log_loss_p")


def _detectable(interval: Interval) -> float | None:
    """Return the difference that a t test at `LEVEL` detects with a power of 80 %."""
    from scipy.special import nctdtrinc, stdtrit  # scipy is slow to import

    if interval.standard_error is None or interval.degrees is None:
        return None
    needed = nctdtrinc(interval.degrees, 1 - POWER, stdtrit(interval.degrees, 1 - LEVEL / 2))
    return float(needed * interval.standard_error)


@dataclass(frozen=True)
class _Run:
    """Arrays for n rows; for graded rows, grades and verdicts are the grades themselves."""

    rows: Sequence[ScoredRow]
    grades: np.ndarray  # 1 for a win, else 0
    ties: np.ndarray  # bool; all False for grades
    verdicts: np.ndarray  # win 1, tie 0, loss -1
    scores: np.ndarray  # scores of all responses


def _run(rows: Sequence[ScoredRow]) -> _Run:
    scores = np.array([score for row in rows for score in row.scores], np.float64)
    if rows[0].is_graded:
        return _Run(rows, scores, np.zeros(len(scores), bool), scores, scores)
    result = outcomes(rows)
    return _Run(rows, result.wins.astype(np.float64), result.ties, np.sign(result.margins), scores)


def _matched(runs: Mapping[str, Sequence[ScoredRow]]) -> tuple[dict[str, _Run], list[str | None]]:
    """Return each run in the same order of comparisons, and the user of each comparison."""
    (first, rows), *others = runs.items()
    place = _places(first, rows)
    result = {first: _run(rows)}
    for name, theirs in others:
        places = _places(name, theirs)
        if odd := places.keys() ^ place.keys():
            one, other = (name, first) if min(odd) in places else (first, name)
            raise DataError(f"comparison {quote(min(odd))} is in {one} only, and not in {other}")
        matched = [theirs[places[row.id]] for row in rows]
        for ours, row in zip(rows, matched, strict=True):
            if ours.user_id != row.user_id or list(ours.labels) != list(row.labels):
                raise DataError(
                    f"comparison {quote(row.id)}: user {quote(ours.user_id)} and labels {quote(list(ours.labels))} "
                    f"in {first}, user {quote(row.user_id)} and labels {quote(list(row.labels))} in {name}"
                )
        result[name] = _run(matched)
    return result, [row.user_id for row in rows]


def _places(name: str, rows: Sequence[ScoredRow]) -> dict[str, int]:
    places = {row.id: place for place, row in enumerate(rows)}
    if not rows or len(places) != len(rows):
        raise DataError(f"{name}: expected at least one comparison, and each once")
    return places


def _rank_groups(names: Sequence[str], apart: set[tuple[str, str]]) -> dict[str, int]:
    """Return the group of each name, from 1: no two members of a group are in ``apart``."""
    groups: dict[str, int] = {}
    members: list[str] = []
    group = 1
    for name in names:
        if any((member, name) in apart for member in members):
            group, members = group + 1, []
        members.append(name)
        groups[name] = group
    return groups


def _score_differences(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Return the entries of "scores" from a, b [n] float64, two scores for each response."""
    difference = a - b
    return {
        "mean": math.fsum(difference) / len(difference),
        "rms": math.sqrt(math.fsum(difference**2) / len(difference)),
        "max_abs": float(np.abs(difference).max()),
        "std_b": float(b.std()),
        "pearson": _correlation(a, b),
        "spearman": _correlation(_ranks(a), _ranks(b)),
    }


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks [n] from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else None


@dataclass(frozen=True)
class Equivalence:
    """The result of two one-sided t tests of a mean difference, the ``estimate``.

    ``p`` is the larger of the two p-values. The difference is within the margin if ``p`` is below 0.05, or
    equivalently if ``ci90`` is within the margin.
    """

    estimate: float
    p: float
    ci90: tuple[float, float]

    @property
    def equivalent(self) -> bool:
        """Whether the difference is shown to be within the margins, at the level 0.05."""
        return self.p < 0.05


def tost(estimate: float, *, standard_error: float, degrees: float, margin: float) -> Equivalence:
    """Test that a mean difference is within the margin, which is above 0 and in the same unit.

    ``degrees`` are the degrees of freedom of the standard error.
    """
    from scipy.special import stdtr, stdtrit  # scipy is slow to import

    assert margin > 0
    if standard_error > 0:
        above = float(stdtr(degrees, -(estimate + margin) / standard_error))
        below = float(stdtr(degrees, (estimate - margin) / standard_error))
    else:  # all differences are equal
        above, below = (float(not inside) for inside in (estimate > -margin, estimate < margin))
    half = float(stdtrit(degrees, 0.95)) * standard_error
    assert math.isfinite(half)
    return Equivalence(estimate, max(above, below), (estimate - half, estimate + half))


def smallest_shift(
    values: np.ndarray, *, standard_error: float, degrees: float, level: float, power: float = POWER
) -> float | None:
    """Return the smallest shift of a mean of verdicts from 0.5 that its interval would have excluded with this power.

    The variance under a shift assumes as many ties as observed (fewer if the shift needs more decided verdicts), times
    the observed design effect: the variance over clusters relative to independent rows, at least 1. Two additional
    verdicts, one each way, enter the variance, as in the intervals of differences.

    Args:
      values: [n] verdicts: 0, 0.5 for a tie, or 1.
      standard_error, degrees: Error and degrees of freedom of their mean, over clusters, with the two additional
        verdicts.
      level: Level of the two-sided interval that must exclude 0.5.
      power: Share of the repetitions in which it does.

    Returns:
      Shift, above 0 and at most 0.5; None if not even a shift of 0.5 would be detected.
    """
    from scipy.special import nctdtrinc, stdtrit  # scipy is slow to import

    n, further = len(values), 0.5 / len(values) ** 2
    needed = float(nctdtrinc(degrees, 1 - power, stdtrit(degrees, (1 + level) / 2)))
    spread, decided = float(np.var(values)), float(np.mean(values != 0.5))
    effect = max((standard_error**2 - further) * n / spread, 1.0) if spread else 1.0
    shifts = np.linspace(0, 0.5, 2001)[1:]
    variances = effect * np.maximum(np.maximum(decided, 2 * shifts) / 4 - shifts**2, 0) / n + further
    enough = shifts >= needed * np.sqrt(variances)
    return float(shifts[np.argmax(enough)]) if enough.any() else None
