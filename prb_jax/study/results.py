"""Compute figures from the margins of all splits: accuracy, log-loss, differences to pooled, adjusted p-values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.metrics.accuracy import group_counts
from prb_jax.metrics.calibration import calibration_of
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.paired import add_holm
from prb_jax.metrics.uncertainty import accuracy_interval, difference_interval, loss_interval, mean_interval
from prb_jax.personal.few_shot.registry import POOLED, STRONG
from prb_jax.study.outcomes import BASELINES, CONTROLS, NO_PROFILE, NO_USER, PLAIN, SHUFFLED, Outcome
from prb_jax.study.population import Population
from prb_jax.study.splits import PARTS, SEEN_PART, UNSEEN_PART, StudySplit

CEILING: Final = "ceiling"
SIMULATED: Final = "simulated"

DIFFERENCES: Final = ("diff_to_pooled", "diff_to_offset", "diff_to_no_user", "gain_from_user")
LOSSES: Final = ("log_loss", *(f"log_loss_{name}" for name in DIFFERENCES[:3]))
NO_PROBABILITIES: Final = ("length", "popularity")  # baselines whose margins are not log-odds

_WITH_INTERVAL: Final = ("accuracy", "user_accuracy", *DIFFERENCES, *LOSSES)
_LEARNED: Final = (
    *(f"{name}{end}" for name in _WITH_INTERVAL for end in ("", "_ci95")),
    *("ties", "half_credit_accuracy", "ece", "brier", "p", "p_log_loss", "above_offset"),
)
"""Figures of how well a method learns from k comparisons."""

DEFINITIONS: Final[Mapping[str, str]] = {
    "split": "unseen: people not used for fitting or choosing settings; seen: held-out choices of people that the "
    "method was fitted on",
    "shots": "comparisons of a person that the method is adapted on; a person who has fewer is adapted on all of them",
    "short": "people with fewer comparisons to adapt on than shots",
    "reached": "people with at least this many; if there are none, accuracies, differences and p are null",
    "reason": "why the figures are null",
    "ties": "queries whose two responses have the same score",
    "half_credit_accuracy": "(strict wins + ties / 2) / n",
    "accuracy": "strict wins / n; a tie is not a win. Every choice counts once, in the first split that asks for it",
    "user_accuracy": "mean over people of their accuracies",
    "accuracy_ci95": "95 % interval over people, two-way over people and responses where several people judge the same "
    "responses",
    "diff_to_pooled": "accuracy minus the accuracy of pooled Bradley-Terry on the same choices, with a paired "
    "interval; diff_to_offset likewise, to pooled with an offset of each user at the same shots",
    "diff_to_no_user": "accuracy minus the same method's accuracy for an unknown person without a profile",
    "log_loss": "mean of -log of the probability of the choice, the sigmoid of the margin, with an interval over the "
    "same clusters; null for scores that are no log-odds. log_loss_diff_to_pooled and so on: minus that of "
    "the other on the same choices; below 0 is better",
    "ece": "expected calibration error of these probabilities, 20 bins",
    "brier": "mean of (1 - the probability of the choice)^2",
    "gain_from_user": "accuracy minus the accuracy with another person's state",
    "p_log_loss": "two-sided, of log_loss_diff_to_pooled: t test with the standard error of its interval. The log-loss "
    "is the primary endpoint: it sees how sure a method is, and so more than whether a choice is right",
    "p": "the same of diff_to_pooled",
    "p_log_loss_holm": "p_log_loss adjusted by the method of Holm (1979) for all methods and shots of the same split",
    "p_holm": "likewise p",
    "above_offset": "whether the interval of diff_to_offset is above 0",
    "seconds_fit": "seconds to fit; with a trained backbone, includes the rewards of all responses under the adapters",
    "seconds_adapt_per_user": "seconds to adapt with the most shots, compiled; all people together, by their number",
    "bytes_per_user": "bytes of one person's state on the device",
    "disk_bytes_per_user": "bytes of the first split's states in states/METHOD, divided by the number of people",
    "no user": "a control: the method's state for an unknown person without a profile",
    "shuffled user": "a control: each person is scored with the state of another person of the same part",
    "ceiling": "simulated (control): what bayes would reach if it knew the true prior, which is drawn from "
    "the posterior of the estimated one, on the same people, pairs and contexts, for shots that somebody has; expected "
    "figures, means over 4 draws of the prior and of everybody's tastes. 'ceiling, no user' knows nobody, "
    "'ceiling, person known' the true taste of each person, whatever its shots; diff_to_no_user is against the former. "
    "All are null, with the reason, if one is below the interval of an observed accuracy with as many shots",
    "no profile": "a control: the method is adapted only on the comparisons",
}


@dataclass(frozen=True)
class _Queries:
    """The m predicted choices of a part of the people, each in the first split that asks for it."""

    part: str  # "unseen" or "seen"
    users: np.ndarray  # int [m], user of each choice
    short: np.ndarray  # int [m], number of comparisons that each choice's person can be adapted on
    clusters: Clusters
    margins: Mapping[tuple[str, str, int], np.ndarray]  # float [m] by (name, control, shots)


def results(
    population: Population, splits: Sequence[StudySplit], outcomes: Mapping[str, Sequence[Outcome]]
) -> list[dict[str, Any]]:
    """Return the rows of ``results.json``, including controls as separate methods ("NAME, shuffled user").

    Args:
      population: The people.
      splits: Splits of the people.
      outcomes: Outcomes of each method or baseline, one for each split, in order.
    """
    rows: list[dict[str, Any]] = []
    for part in (UNSEEN_PART, SEEN_PART):
        of_part = _rows_of(population, splits, outcomes, part)
        known = (POOLED, *BASELINES)
        tested = [row for row in of_part if row["control"] is None and row["method"] not in known]
        add_holm(tested)
        add_holm(tested, p="p_log_loss")
        rows += of_part
        if of_part and "bayes" in outcomes:
            simulated = [outcome.figures.get(CEILING, []) for outcome in outcomes["bayes"]]
            reached = {row["shots"] for row in of_part if row["reason"] is None}
            ceilings = reached_ceilings(_ceiling_rows(simulated, list(of_part[0]), PARTS[part]), reached)
            rows += held_ceilings(ceilings, of_part)
    return rows


def reached_ceilings(rows: Sequence[dict[str, Any]], reached: set[int]) -> list[dict[str, Any]]:
    """Return the ceilings with shots that somebody reaches. The ceiling of a known person, whatever the shots, is shown
    at the most of these."""
    most = max(reached, default=0)
    return [
        row | {"shots": min(row["shots"], most)}
        for row in rows
        if row["shots"] in reached or row["method"] != CEILING
    ]


def held_ceilings(
    ceilings: Sequence[dict[str, Any]], observed: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the ceilings of a part of the people, all without figures and with the reason if one of them is below the
    interval of an observed accuracy with as many shots: these people then differ from the simulated ones."""
    of_shots = {row["shots"]: row["accuracy"] for row in ceilings if row["method"] == CEILING}
    above = [
        row
        for row in observed
        if row["control"] is None and row["accuracy_ci95"] and row["shots"] in of_shots
        if row["accuracy_ci95"][0] > of_shots[row["shots"]]
    ]
    if not above:
        return list(ceilings)
    worst = max(above, key=lambda row: row["accuracy_ci95"][0] - of_shots[row["shots"]])
    low, high = worst["accuracy_ci95"]
    reason = (
        f"{worst['method']} has {worst['accuracy']:.3f} [{low:.3f}, {high:.3f}] with k = {worst['shots']}, above the "
        f"simulated {of_shots[worst['shots']]:.3f}: these people do not choose as the prior of bayes says, and no "
        "ceiling is known"
    )
    kept = ("method", "control", "split", "shots", "n")
    return [row | {name: None for name in row if name not in kept} | {"reason": reason} for row in ceilings]


def subset_results(
    population: Population, splits: Sequence[StudySplit], outcomes: Mapping[str, Sequence[Outcome]]
) -> list[dict[str, Any]]:
    """Return the rows of ``subsets.json``: the rows of :func:`results` for unseen people, without controls and adjusted
    p-values, restricted to the choices of each subset; empty if the data have fewer than two subsets.

    The arguments are the same as for :func:`results`.
    """
    names = np.array([name or "" for name in population.subsets])
    subsets = list(dict.fromkeys(names.tolist()))
    return [
        {"subset": subset or None, **row}
        for subset in (subsets if len(subsets) > 1 else ())
        for row in _rows_of(population, splits, outcomes, UNSEEN_PART, among=names == subset)
    ]


def outcome_table(
    population: Population, splits: Sequence[StudySplit], outcomes: Mapping[str, Sequence[Outcome]]
) -> Iterator[list[str]]:
    """Yield the lines of ``outcomes.csv``, the heads first: a line for each choice that a split asks for.

    A line has the id of the comparison, its user and subset, the split, the part of the person, the number of
    comparisons that the person can be adapted on, and the margin of each method with each number of shots: above 0 is a
    win. Controls are excluded. The arguments are the same as for :func:`results`.
    """
    first = next(iter(outcomes.values()))
    columns = [
        (name, shots)
        for name, of_splits in outcomes.items()
        for control, shots in sorted(of_splits[0].margins)
        if control == PLAIN and all((PLAIN, shots) in outcome.margins for outcome in of_splits)
    ]
    known = ("id", "user", "subset", "split", "part", "known")
    yield [*known, *(f"{name} {shots}" for name, shots in columns)]
    for number, (split, asked) in enumerate(zip(splits, first, strict=True)):
        margins = [outcomes[name][number].margins[PLAIN, shots] for name, shots in columns]
        for row, place in enumerate(asked.places.tolist()):
            user = int(population.choices.users[place])
            yield [
                population.ids[place],
                population.users[user],
                population.subsets[place] or "",
                str(split.seed),
                PARTS[split.part[user]],
                str(asked.short[row]),
                *(f"{float(margin[row]):.7g}" for margin in margins),
            ]


def _rows_of(
    population: Population,
    splits: Sequence[StudySplit],
    outcomes: Mapping[str, Sequence[Outcome]],
    part: int,
    *,
    among: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Return the rows for a part of the people; with ``among``, bool [n], only of these choices, without controls."""
    first = next(iter(outcomes.values()))  # all outcomes of a split have the same choices
    users = population.choices.users
    chosen = [split.part[users[outcome.places]] == part for split, outcome in zip(splits, first, strict=True)]
    if among is not None:
        chosen = [here & among[outcome.places] for here, outcome in zip(chosen, first, strict=True)]

    def gather(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([column[here] for column, here in zip(columns, chosen, strict=True)])

    places, once = np.unique(gather([outcome.places for outcome in first]), return_index=True)
    if not len(places):
        return []
    controls = (PLAIN, *CONTROLS) if among is None else (PLAIN, SHUFFLED)
    margins = {
        (name, *key): gather([outcome.margins[key] for outcome in of_splits])[once]
        for name, of_splits in outcomes.items()
        for key in sorted(of_splits[0].margins, key=lambda key: ((PLAIN, *CONTROLS).index(key[0]), key[1]))
        if key[0] in controls and all(key in outcome.margins for outcome in of_splits)
    }
    short = gather([outcome.short for outcome in first])[once]
    clusters = population.clusters.take(places.tolist())
    asked = _Queries(PARTS[part], users[places], short, clusters, margins)
    return [_row(asked, outcomes[key[0]], key) for key in margins if among is None or key[1] == PLAIN]


def _row(asked: _Queries, outcomes: Sequence[Outcome], key: tuple[str, str, int]) -> dict[str, Any]:
    (name, control, shots), margins = key, asked.margins[key]
    wins, clusters, counts = margins > 0, asked.clusters, group_counts(margins > 0, asked.clusters.users)
    few = len(np.unique(asked.users[asked.short < shots]))
    row: dict[str, Any] = {
        "method": f"{name}, {control}" if control else name,
        "control": control or None,
        "split": asked.part,
        "shots": shots,
        "n": len(wins),
        "users": len(counts.rows),
        "accuracy": float(wins.mean()),
        "accuracy_ci95": accuracy_interval(wins, clusters).bounds,
        "user_accuracy": float(np.mean(counts.accuracy)),
        "user_accuracy_ci95": accuracy_interval(wins, clusters, per_user=True).bounds,
        "ties": int((margins == 0).sum()),
        "half_credit_accuracy": float(wins.mean() + (margins == 0).mean() / 2),
        "short": few,
        "reached": len(counts.rows) - few,
        "reason": None,
    }
    probable, losses = name not in NO_PROBABILITIES, _losses(margins)
    row["log_loss"] = float(losses.mean()) if probable else None
    row["log_loss_ci95"] = loss_interval(losses, clusters).bounds if probable else None

    def add_loss_difference(field: str, other: np.ndarray | None) -> float | None:
        """Add the difference to the losses of other margins, with its interval; return its p-value."""
        row[field] = row[f"{field}_ci95"] = None
        if other is None or not probable:
            return None
        gains = losses - _losses(other)
        interval = mean_interval(gains, clusters.users, responses=clusters.responses)
        row[field], row[f"{field}_ci95"] = float(gains.mean()), interval.bounds
        return interval.p_value(row[field])

    sure = 1 / (1 + np.exp(-np.abs(margins.astype(np.float64))))
    calibrated = calibration_of(sure, wins + 0.5 * (margins == 0))
    row |= {figure: calibrated[figure] if probable else None for figure in ("ece", "brier")}
    baseline = name in (POOLED, *BASELINES)

    def same(other: str) -> np.ndarray | None:
        """Return the margins of another method with the same shots."""
        if other == name:
            return None
        return asked.margins.get((other, PLAIN, shots), asked.margins.get((other, NO_USER, 0)))

    others = {
        "diff_to_pooled": same(POOLED),
        "diff_to_offset": None if baseline else same(STRONG),
        "diff_to_no_user": None if baseline or control == NO_USER else asked.margins.get((name, NO_USER, 0)),
        "gain_from_user": asked.margins.get((name, SHUFFLED, shots))
        if control in (PLAIN, NO_PROFILE)
        else None,
    }
    for field, other in others.items():
        interval = None
        if other is not None:
            interval = difference_interval(wins.astype(np.int64) - (other > 0), clusters)
        row[field] = None if other is None else float(wins.mean() - (other > 0).mean())
        row[f"{field}_ci95"] = interval and interval.bounds
        if field == "gain_from_user":
            continue
        p = add_loss_difference(f"log_loss_{field}", other)
        if field == "diff_to_pooled":
            row |= {"p": interval and interval.p_value(row[field]), "p_log_loss": p}
    row["p_holm"] = row["p_log_loss_holm"] = None
    bounds = row["diff_to_offset_ci95"]
    row["above_offset"] = None if bounds is None else bounds[0] > 0
    for figure in ("seconds_fit", "seconds_adapt_per_user"):
        row[figure] = float(np.mean([outcome.figures.get(figure, 0.0) for outcome in outcomes]))
    for figure in ("bytes_per_user", "disk_bytes_per_user"):
        row[figure] = 0 if control == NO_USER else outcomes[0].figures.get(figure)
    if shots and not row["reached"]:
        most = f"(most: {int(asked.short.max()):,})"
        reason = f"none of {row['users']:,} people has {shots} comparisons to be adapted on {most}"
        row |= dict.fromkeys(_LEARNED) | {"reason": reason}
    return row


def _losses(margins: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, -margins.astype(np.float64))


def _ceiling_rows(
    simulated: Sequence[Sequence[Mapping[str, Any]]], fields: Sequence[str], part: str
) -> list[dict[str, Any]]:
    """Return the rows of the simulated ceiling for a part of the people: means over splits of the figures of
    :func:`prb_jax.study.simulation.ceiling` (absent in outcomes of earlier versions); other fields are null."""
    of_splits = [[row for row in rows if row["split"] == part] for rows in simulated if rows]
    ceilings: list[dict[str, Any]] = []
    for group in zip(*of_splits, strict=True):
        counts, known = [row["n"] for row in group], group[0]["known"]
        row: dict[str, Any] = dict.fromkeys(fields) | {
            "method": f"{CEILING}, {known}" if known else CEILING,
            "control": SIMULATED,
            "split": part,
            "shots": group[0]["shots"],
            "n": sum(counts),
        }
        for name in ("accuracy", "log_loss"):
            row[name] = float(np.average([one[name] for one in group], weights=counts))
        ceilings.append(row)
    nobody = next((row for row in ceilings if row["method"] == f"{CEILING}, {NO_USER}"), None)
    for row in ceilings:
        if nobody is not None and row is not nobody:
            row["diff_to_no_user"] = row["accuracy"] - nobody["accuracy"]
            row["log_loss_diff_to_no_user"] = row["log_loss"] - nobody["log_loss"]
    return ceilings
