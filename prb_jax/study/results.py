"""From the verdicts of all splits to figures: accuracies with intervals, differences to pooled, adjusted p-values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.metrics.accuracy import group_counts
from prb_jax.metrics.paired import holm
from prb_jax.metrics.uncertainty import Interval, accuracy_interval, difference_interval
from prb_jax.study.outcomes import (
    BASELINES,
    CONTROLS,
    NO_PROFILE,
    NO_USER,
    PLAIN,
    SHUFFLED,
    TIED,
    WON,
    Outcome,
)
from prb_jax.study.population import Population
from prb_jax.study.splits import SEEN_PART, UNSEEN_PART, Split

POOLED: Final = "pooled"
STRONG: Final = "offset"
"""Pooled and an offset of each user: the fair baseline of every personal method."""

LEVEL: Final = 0.05

_LEARNED: Final = (
    *("accuracy", "accuracy_ci95", "user_accuracy", "user_accuracy_ci95", "ties", "p", "above_offset"),
    *(
        f"{name}{end}"
        for name in ("diff_to_pooled", "diff_to_offset", "gain_from_user")
        for end in ("", "_ci95")
    ),
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
    "no profile": "a control: the method is adapted on the comparisons alone",
}


@dataclass(frozen=True)
class _Verdicts:
    """Verdicts [m] of choices ``places`` [m] that are in increasing order, each once."""

    places: np.ndarray
    short: np.ndarray
    found: np.ndarray

    @property
    def wins(self) -> np.ndarray:
        return self.found == WON


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
    for name_of_part, part in (("unseen", UNSEEN_PART), ("seen", SEEN_PART)):
        gathered = {
            name: {
                key: _gather(population, splits, found, part, key)
                for key in found[0].verdicts
                if all(key in outcome.verdicts for outcome in found)
            }
            for name, found in outcomes.items()
        }
        here = [
            _row(population, name, outcomes[name], gathered, name_of_part, key)
            for name, found in gathered.items()
            for key in _ordered(found)
            if len(found[key].places)
        ]
        _adjust([row for row in here if row["control"] is None and row["method"] not in (POOLED, *BASELINES)])
        rows += here
    return rows


def subset_results(
    population: Population, splits: Sequence[Split], outcomes: Mapping[str, Sequence[Outcome]]
) -> list[dict[str, Any]]:
    """Return the rows of ``subsets.json``: those of :func:`results` of unseen people, without controls and adjusted
    p-values, for the choices of each subset alone; none where the data name fewer than two subsets.

    Arguments as of :func:`results`.
    """
    names = np.array([name or "" for name in population.subsets])
    rows: list[dict[str, Any]] = []
    for subset in dict.fromkeys(names.tolist()) if len(set(names.tolist())) > 1 else ():
        gathered = {
            name: {
                key: _among(_gather(population, splits, found, UNSEEN_PART, key), names == subset)
                for key in found[0].verdicts
                if key[0] in (PLAIN, SHUFFLED) and all(key in outcome.verdicts for outcome in found)
            }
            for name, found in outcomes.items()
        }
        rows += [
            {"subset": subset or None, **_row(population, name, outcomes[name], gathered, "unseen", key)}
            for name, found in gathered.items()
            for key in _ordered(found)
            if key[0] == PLAIN and len(found[key].places)
        ]
    return rows


def _among(verdicts: _Verdicts, chosen: np.ndarray) -> _Verdicts:
    kept = chosen[verdicts.places]
    return _Verdicts(verdicts.places[kept], verdicts.short[kept], verdicts.found[kept])


def _ordered(found: Mapping[tuple[str, int], _Verdicts]) -> list[tuple[str, int]]:
    order = [PLAIN, *CONTROLS]
    return sorted(found, key=lambda key: (order.index(key[0]), key[1]))


def _gather(
    population: Population,
    splits: Sequence[Split],
    outcomes: Sequence[Outcome],
    part: int,
    key: tuple[str, int],
) -> _Verdicts:
    places, short, found = [], [], []
    for split, outcome in zip(splits, outcomes, strict=True):
        own = split.part[population.choices.users[outcome.places]] == part
        places.append(outcome.places[own])
        short.append(outcome.short[own])
        found.append(outcome.verdicts[key][own])
    once, first = np.unique(np.concatenate(places), return_index=True)
    return _Verdicts(once, np.concatenate(short)[first], np.concatenate(found)[first])


def _row(
    population: Population,
    name: str,
    outcomes: Sequence[Outcome],
    gathered: Mapping[str, Mapping[tuple[str, int], _Verdicts]],
    part: str,
    key: tuple[str, int],
) -> dict[str, Any]:
    control, shots = key
    verdicts = gathered[name][key]
    wins, clusters = verdicts.wins, population.clusters.take(verdicts.places.tolist())
    users = population.choices.users[verdicts.places]
    counts = group_counts(wins, clusters.users)
    few = len(np.unique(users[verdicts.short < shots]))
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
        "ties": int((verdicts.found == TIED).sum()),
        "short": few,
        "reached": len(counts.rows) - few,
        "reason": None,
    }

    def against(other: _Verdicts | None) -> Interval | None:
        if other is None:
            return None
        return difference_interval(wins.astype(np.int64) - other.wins.astype(np.int64), clusters)

    def difference(other: _Verdicts | None) -> float | None:
        return None if other is None else float(wins.mean() - other.wins.mean())

    pooled = _same(gathered, POOLED, shots, name)
    strong = _same(gathered, STRONG, shots, name) if name not in (POOLED, *BASELINES) else None
    shuffled = gathered[name].get((SHUFFLED, shots)) if control in (PLAIN, NO_PROFILE) else None
    for field, other in (
        ("diff_to_pooled", pooled),
        ("diff_to_offset", strong),
        ("gain_from_user", shuffled),
    ):
        found = against(other)
        row[field] = difference(other)
        row[f"{field}_ci95"] = None if found is None else found.bounds
        if field == "diff_to_pooled":
            row["p"] = None if found is None else found.p_value(float(row[field]))
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
            f"{int(verdicts.short.max()):,})"
        )
        row |= dict.fromkeys(_LEARNED) | {"reason": reason}
    return row


def _same(
    gathered: Mapping[str, Mapping[tuple[str, int], _Verdicts]], other: str, shots: int, name: str
) -> _Verdicts | None:
    """The verdicts of another method with the same shots, on the same choices."""
    found = gathered.get(other)
    if found is None or other == name:
        return None
    return found.get((PLAIN, shots)) or found.get((NO_USER, 0))


def _adjust(rows: Sequence[dict[str, Any]]) -> None:
    tested = [row for row in rows if row["p"] is not None]
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = float(adjusted)
