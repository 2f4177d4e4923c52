"""From the margins of all splits to figures: accuracy, log-loss, differences to pooled, adjusted p-values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.metrics.accuracy import group_counts
from prb_jax.metrics.calibration import calibration_of
from prb_jax.metrics.paired import holm
from prb_jax.metrics.uncertainty import Interval, accuracy_interval, difference_interval, mean_interval
from prb_jax.personal.few_shot.registry import POOLED, STRONG
from prb_jax.study.ceiling import ceiling_rows
from prb_jax.study.outcomes import (
    BASELINES,
    CONTROLS,
    NO_PROFILE,
    NO_USER,
    PLAIN,
    SHUFFLED,
    Outcome,
)
from prb_jax.study.population import Population
from prb_jax.study.splits import SEEN_PART, UNSEEN_PART, Split

LEVEL: Final = 0.05

DIFFERENCES: Final = ("diff_to_pooled", "diff_to_offset", "diff_to_no_user", "gain_from_user")
LOSSES: Final = ("log_loss", *(f"log_loss_{name}" for name in DIFFERENCES[:3]))
NO_PROBABILITIES: Final = ("length", "popularity")
"""Baselines whose margins are no log-odds."""

_LEARNED: Final = (
    *(
        f"{name}{end}"
        for name in ("accuracy", "user_accuracy", *DIFFERENCES, *LOSSES)
        for end in ("", "_ci95")
    ),
    *("ties", "ece", "p", "above_offset"),
)
"""The figures that say how well k comparisons are learned from."""

DEFINITIONS: Final[Mapping[str, str]] = {
    "split": "unseen: people on whom nothing was fitted or chosen; seen: held-out choices of people that the method "
    "was fitted on",
    "shots": "comparisons of a person that the method is adapted on; a person who has fewer is adapted on all of them",
    "short": "people who have fewer comparisons to be adapted on than shots",
    "reached": "people who have as many; where nobody has, accuracies, differences and p are null",
    "reason": "why the figures are null",
    "ties": "queries whose two responses have the same score",
    "accuracy": "strict wins / n; a tie is not a win. Every choice counts once, in the first split that asks for it",
    "user_accuracy": "mean over people of their accuracies",
    "accuracy_ci95": "95 % interval over people, two-way over people and responses where several people judge the same "
    "responses",
    "diff_to_pooled": "accuracy minus that of pooled Bradley-Terry on the same choices, with a paired interval; "
    "diff_to_offset likewise, to pooled with an offset of each user at the same shots",
    "diff_to_no_user": "accuracy minus that of the same method when nothing is known of the person, not even a profile",
    "log_loss": "mean of -log of the probability of the choice, the sigmoid of the margin, with the interval of a mean "
    "over the same clusters; null for scores that are no log-odds. log_loss_diff_to_pooled and so on: minus that of "
    "the other on the same choices; below 0 is better",
    "ece": "expected calibration error of these probabilities, 20 bins",
    "gain_from_user": "accuracy minus that with the state of another person",
    "p": "two-sided, of diff_to_pooled: t test with the standard error of its interval",
    "p_holm": "p adjusted by the method of Holm (1979) for all methods and shots of the same split",
    "above_offset": "whether the interval of diff_to_offset lies above 0",
    "seconds_fit": "of a method that trains the backbone with the rewards of all responses under its adapters",
    "seconds_adapt_per_user": "with the largest number of shots, compiled; all people together, by their number",
    "bytes_per_user": "of the state of a person, on the device",
    "disk_bytes_per_user": "of the states of all people of the first split in states/METHOD, by their number",
    "no user": "a control: the method's state of a person of whom nothing is known, not even a profile",
    "shuffled user": "a control: each person is scored with the state of another one of the same part",
    "ceiling": "simulated (control): what bayes would reach if its estimated prior were the truth, on the same people, "
    "pairs and contexts; expected figures, means over 8 draws of everybody's tastes. 'ceiling, no user' knows nobody, "
    "'ceiling, person known' the true taste of each person, whatever its shots; diff_to_no_user is against the former",
    "no profile": "a control: the method is adapted on the comparisons alone",
}


@dataclass(frozen=True)
class _Margins:
    """Margins [m] of choices ``places`` [m] that are in increasing order, each once."""

    places: np.ndarray
    short: np.ndarray
    margins: np.ndarray

    @property
    def wins(self) -> np.ndarray:
        return self.margins > 0

    @property
    def losses(self) -> np.ndarray:
        return np.logaddexp(0.0, -self.margins.astype(np.float64))


def results(
    population: Population, splits: Sequence[Split], outcomes: Mapping[str, Sequence[Outcome]]
) -> list[dict[str, Any]]:
    """Return the rows of ``results.json``, controls among them as methods of their own ("NAME, shuffled user").

    Args:
      population: the people.
      splits: of them.
      outcomes: of each method or baseline, one for each split, in their order.
    """
    rows: list[dict[str, Any]] = []
    for part in (UNSEEN_PART, SEEN_PART):
        of_part = _rows_of(population, splits, outcomes, part)
        baselines = (POOLED, *BASELINES)
        _adjust([row for row in of_part if row["control"] is None and row["method"] not in baselines])
        rows += of_part
        if of_part and "bayes" in outcomes:
            figures = [outcome.figures for outcome in outcomes["bayes"]]
            rows += ceiling_rows(figures, list(of_part[0]), of_part[0]["split"])
    return rows


def subset_results(
    population: Population, splits: Sequence[Split], outcomes: Mapping[str, Sequence[Outcome]]
) -> list[dict[str, Any]]:
    """Return the rows of ``subsets.json``: those of :func:`results` of unseen people, without controls and adjusted
    p-values, for the choices of each subset alone; none where the data name fewer than two subsets.

    Arguments as of :func:`results`.
    """
    names = np.array([name or "" for name in population.subsets])
    subsets = list(dict.fromkeys(names.tolist()))
    return [
        {"subset": subset or None, **row}
        for subset in (subsets if len(subsets) > 1 else ())
        for row in _rows_of(
            population, splits, outcomes, UNSEEN_PART, among=names == subset, controls=(PLAIN, SHUFFLED)
        )
        if row["control"] is None
    ]


def _rows_of(
    population: Population,
    splits: Sequence[Split],
    outcomes: Mapping[str, Sequence[Outcome]],
    part: int,
    *,
    among: np.ndarray | None = None,
    controls: Sequence[str] = (PLAIN, *CONTROLS),
) -> list[dict[str, Any]]:
    """The rows of a part of the people; with ``among``, bool [n], of these choices alone."""
    gathered = {
        name: {
            key: _gather(population, splits, of_splits, part, key, among)
            for key in sorted(
                of_splits[0].margins, key=lambda key: ((PLAIN, *CONTROLS).index(key[0]), key[1])
            )
            if key[0] in controls and all(key in outcome.margins for outcome in of_splits)
        }
        for name, of_splits in outcomes.items()
    }
    name_of_part = "unseen" if part == UNSEEN_PART else "seen"
    return [
        _row(population, name, outcomes[name], gathered, name_of_part, key)
        for name, by_key in gathered.items()
        for key, found in by_key.items()
        if len(found.places)
    ]


def _gather(
    population: Population,
    splits: Sequence[Split],
    outcomes: Sequence[Outcome],
    part: int,
    key: tuple[str, int],
    among: np.ndarray | None,
) -> _Margins:
    """The margins of all splits, each choice in the first one that asks for it."""
    columns = []
    for split, outcome in zip(splits, outcomes, strict=True):
        chosen = split.part[population.choices.users[outcome.places]] == part
        if among is not None:
            chosen &= among[outcome.places]
        columns.append([column[chosen] for column in (outcome.places, outcome.short, outcome.margins[key])])
    places, short, margins = (np.concatenate(column) for column in zip(*columns, strict=True))
    once, first = np.unique(places, return_index=True)
    return _Margins(once, short[first], margins[first])


def _row(
    population: Population,
    name: str,
    outcomes: Sequence[Outcome],
    gathered: Mapping[str, Mapping[tuple[str, int], _Margins]],
    part: str,
    key: tuple[str, int],
) -> dict[str, Any]:
    control, shots = key
    here = gathered[name][key]
    wins, losses, clusters = here.wins, here.losses, population.clusters.take(here.places.tolist())
    users = population.choices.users[here.places]
    counts = group_counts(wins, clusters.users)
    few = len(np.unique(users[here.short < shots]))
    row: dict[str, Any] = {
        "method": f"{name}, {control}" if control else name,
        "control": control or None,
        "split": part,
        "shots": shots,
        "n": len(wins),
        "users": len(counts.rows),
        "accuracy": float(wins.mean()),
        "accuracy_ci95": accuracy_interval(wins, clusters).bounds,
        "user_accuracy": float(np.mean(counts.accuracy)),
        "user_accuracy_ci95": accuracy_interval(wins, clusters, per_user=True).bounds,
        "ties": int((here.margins == 0).sum()),
        "short": few,
        "reached": len(counts.rows) - few,
        "reason": None,
    }

    def mean(values: np.ndarray) -> Interval:
        return mean_interval(values, clusters.users, responses=clusters.responses)

    probable = name not in NO_PROBABILITIES
    row["log_loss"] = float(losses.mean()) if probable else None
    row["log_loss_ci95"] = mean(losses).bounds if probable else None
    sure = 1 / (1 + np.exp(-np.abs(here.margins.astype(np.float64))))
    right = wins + 0.5 * (here.margins == 0)
    row["ece"] = calibration_of(sure, right)["ece"] if probable else None
    baseline = name in (POOLED, *BASELINES)
    others = {
        "diff_to_pooled": _same(gathered, POOLED, shots, name),
        "diff_to_offset": None if baseline else _same(gathered, STRONG, shots, name),
        "diff_to_no_user": None if baseline or control == NO_USER else gathered[name].get((NO_USER, 0)),
        "gain_from_user": gathered[name].get((SHUFFLED, shots)) if control in (PLAIN, NO_PROFILE) else None,
    }
    for field, other in others.items():
        interval = None
        if other is not None:
            interval = difference_interval(wins.astype(np.int64) - other.wins.astype(np.int64), clusters)
        row[field] = None if other is None else float(wins.mean() - other.wins.mean())
        row[f"{field}_ci95"] = None if interval is None else interval.bounds
        if field == "diff_to_pooled":
            row["p"] = None if interval is None else interval.p_value(row[field])
        if field != "gain_from_user":
            less = losses - other.losses if other is not None and probable else None
            row[f"log_loss_{field}"] = None if less is None else float(less.mean())
            row[f"log_loss_{field}_ci95"] = None if less is None else mean(less).bounds
    row["p_holm"] = None
    bounds = row["diff_to_offset_ci95"]
    row["above_offset"] = None if bounds is None else bounds[0] > 0
    for figure in ("seconds_fit", "seconds_adapt_per_user"):
        row[figure] = float(np.mean([outcome.figures[figure] for outcome in outcomes]))
    for figure in ("bytes_per_user", "disk_bytes_per_user"):
        row[figure] = 0 if control == NO_USER else outcomes[0].figures.get(figure)
    if shots and not row["reached"]:
        reason = (
            f"none of {row['users']:,} people has {shots} comparisons to be adapted on (most: "
            f"{int(here.short.max()):,})"
        )
        row |= dict.fromkeys(_LEARNED) | {"reason": reason}
    return row


def _same(
    gathered: Mapping[str, Mapping[tuple[str, int], _Margins]], other: str, shots: int, name: str
) -> _Margins | None:
    """The margins of another method with the same shots, on the same choices."""
    if other == name or other not in gathered:
        return None
    return gathered[other].get((PLAIN, shots)) or gathered[other].get((NO_USER, 0))


def _adjust(rows: Sequence[dict[str, Any]]) -> None:
    tested = [row for row in rows if row["p"] is not None]
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = float(adjusted)
