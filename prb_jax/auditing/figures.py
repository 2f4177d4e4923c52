"""The figures of an audit: agreement, personal fit against the label, general quality, attention, what to adjudicate.

They are taken from first judgements of items. Gold items and items that were judged again tell of attention alone.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.auditing.items import CRITERIA, POINTS, is_rejected_first
from prb_jax.auditing.judgements import LABELS, AuditState, Judged
from prb_jax.metrics.annotators import MISSING, ORDINAL
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.equivalence import tost
from prb_jax.metrics.resampling import Estimate, agreement_with_intervals, cohen_with_interval, too_few
from prb_jax.metrics.uncertainty import accuracy_interval, clustered_interval, mean_interval

FAR_APART: Final = 3
"""Ratings of one response that differ by so many points go to adjudication."""


@dataclass(frozen=True)
class FirstJudgements:
    """The first judgements of items.

    Attributes:
      rows: of every item that was judged, by annotator.
      annotators: who judged any of them.
      clusters: of the rows: the user of each item, or the item itself where not all items name one.
      over: what these are called, in the plural.
    """

    rows: Sequence[Mapping[str, Judged]]
    annotators: Sequence[str]
    clusters: Sequence[str]
    over: str

    def numbers(self, value: Any) -> np.ndarray:
        """Return a table [items, annotators] of a number of each judgement, ``MISSING`` for None."""
        table = np.full((len(self.rows), len(self.annotators)), MISSING)
        for place, row in enumerate(self.rows):
            for column, name in enumerate(self.annotators):
                number = value(row[name].judgement) if name in row else None
                if number is not None:
                    table[place, column] = number
        return table


def make_table(state: AuditState) -> FirstJudgements:
    """Return the first judgements of items, in the order of the items."""
    rows: dict[int, dict[str, Judged]] = defaultdict(dict)
    for judged in state.judged:
        if judged.showing == 0 and judged.item.kind == "item":
            rows[judged.item.number][judged.annotator] = judged
    numbers = sorted(rows)
    items = [state.items[number - 1] for number in numbers]
    users = [item.shown["user_id"] for item in items]
    by_user = bool(users) and all(user is not None for user in users) and len(set(users)) < len(users)
    annotators = dict.fromkeys(judged.annotator for judged in state.judged)
    known = [name for name in annotators if any(name in row for row in rows.values())]
    return FirstJudgements(
        rows=[rows[number] for number in numbers],
        annotators=known,
        clusters=users if by_user else [item.id for item in items],
        over="users" if by_user else "items",
    )


def fit_figures(table: FirstJudgements, *, seed: int) -> dict[str, Any]:
    """Return agreement about personal fit, and how often it is the label."""
    fits = table.numbers(lambda judgement: judgement.fit)
    # Annotators do not know which response is labelled: their categories are two responses in an order drawn by lot.
    # With "chosen" and "rejected" as categories, people who all choose well would not agree beyond chance.
    drawn = np.array([is_rejected_first(seed, next(iter(row.values())).item.id) for row in table.rows], bool)
    coded = np.where((fits != MISSING) & drawn[:, None], 1 - fits, fits)
    grouped = {"clusters": table.clusters, "over": table.over, "seed": seed}
    agreement = agreement_with_intervals(coded, categories=2, **grouped)
    pairs = []
    for a, b in itertools.combinations(range(len(table.annotators)), 2):
        first, second = coded[:, a], coded[:, b]
        both = int(((first != MISSING) & (second != MISSING)).sum())
        if both:
            kappa = cohen_with_interval(first, second, categories=2, **grouped).to_json()
            pairs.append({"a": table.annotators[a], "b": table.annotators[b], "items": both, **kappa})
    kappas = [pair["value"] for pair in pairs if pair["value"] is not None]
    return {
        "agreement": {name: estimate.to_json() for name, estimate in agreement.items()},
        "cohen": {"mean": statistics.fmean(kappas) if kappas else None, "pairs": pairs},
        "label": _against_label(table, fits),
        "majority": _majority(table, fits),
        "cannot_tell": int(sum(len(row) for row in table.rows) - (fits != MISSING).sum()),
    }


def quality_figures(table: FirstJudgements, *, margin: float, seed: int) -> dict[str, Any]:
    """Return agreement about general quality, and chosen minus rejected with two one-sided tests of equivalence."""
    figures: dict[str, Any] = {}
    for name in CRITERIA:
        sides = [
            table.numbers(lambda judgement, name=name, side=side: _place(judgement.quality[name][side]))
            for side in range(2)
        ]
        agreement = agreement_with_intervals(
            np.concatenate(sides),
            categories=len(POINTS),
            level=ORDINAL,
            clusters=[*table.clusters, *table.clusters],
            over=table.over,
            seed=seed,
        )
        figures[name] = {
            "alpha": agreement["alpha"].to_json(),
            **_difference(table, (name,), margin),
        }
    return {"overall": _difference(table, CRITERIA, margin), "criteria": figures}


def attention_figures(state: AuditState) -> list[dict[str, Any]]:
    """Return of every annotator how much was judged, and how attentively."""
    people = []
    for name in dict.fromkeys(judged.annotator for judged in state.judged):
        all_of_them = [judged for judged in state.judged if judged.annotator == name]
        first = {judged.item.number: judged for judged in all_of_them if judged.showing == 0}
        checks = [judged for judged in state.checks if judged.annotator == name]
        gold = [judged for judged in checks if judged.item.kind == "gold"]
        again = [
            (first[check.item.number], check)
            for check in checks
            if check.showing and check.item.number in first
        ]
        known = [judged for judged in all_of_them if judged.judgement.fit is not None]
        a = sum((judged.judgement.fit == 1) == judged.swapped for judged in known)
        ratings = [
            abs(x - y)
            for before, after in again
            for name in CRITERIA
            for x, y in zip(before.judgement.quality[name], after.judgement.quality[name], strict=True)
            if x is not None and y is not None
        ]
        people.append(
            {
                "name": name,
                "judgements": len(all_of_them),
                "cannot_tell": len(all_of_them) - len(known),
                "gold_right": sum(judged.judgement.fit == 0 for judged in gold),
                "gold": len(gold),
                "again_same": sum(x.judgement.fit == y.judgement.fit for x, y in again),
                "again": len(again),
                "again_rating_difference": statistics.fmean(ratings) if ratings else None,
                "chose_a": a,
                "chose": len(known),
                "chose_a_p": _coin(a, len(known)),
                "median_seconds": statistics.median(judged.at - judged.opened for judged in all_of_them),
            }
        )
    return people


def adjudication_queue(table: FirstJudgements) -> list[dict[str, Any]]:
    """Return the items about which annotators disagree, or the label, the most disputed ones first."""
    queue = []
    for row in table.rows:
        by_person = {name: judged.judgement for name, judged in row.items()}
        judgements = by_person.values()
        fits = [judgement.fit for judgement in judgements if judgement.fit is not None]
        chosen, rejected = fits.count(0), fits.count(1)
        reasons = []
        if chosen and rejected:
            reasons.append("the annotators disagree about the personal fit")
        if rejected > chosen:
            reasons.append("the label says otherwise")
        if not fits:
            reasons.append("nobody can tell the personal fit")
        for name in CRITERIA:
            for side, called in enumerate(LABELS):
                of_side = (judgement.quality[name][side] for judgement in judgements)
                ratings = [rating for rating in of_side if rating is not None]
                if ratings and max(ratings) - min(ratings) >= FAR_APART:
                    reasons.append(
                        f"{name} of the {called} response: ratings from {min(ratings)} to {max(ratings)}"
                    )
        if not reasons:
            continue
        first = next(iter(row.values()))
        dispute = min(chosen, rejected) / max(len(fits), 1)
        queue.append(
            {
                "id": first.item.id,
                "user_id": first.item.shown["user_id"],
                "dispute": dispute,
                "reasons": reasons,
                "fit": {
                    name: None if judgement.fit is None else LABELS[judgement.fit]
                    for name, judgement in by_person.items()
                },
                "comments": {
                    name: judgement.comment for name, judgement in by_person.items() if judgement.comment
                },
            }
        )
    queue.sort(key=lambda entry: (-entry["dispute"], -len(entry["reasons"])))
    return queue


def _place(rating: int | None) -> int | None:
    return None if rating is None else POINTS.index(rating)


def _against_label(table: FirstJudgements, fits: np.ndarray) -> dict[str, Any]:
    """The share of all judgements of personal fit that are the label."""
    items, columns = (indices.tolist() for indices in np.nonzero(fits != MISSING))
    wins = fits[items, columns] == 0
    if not len(wins):
        return Estimate(None, reasons={"value": "no judgement of personal fit"}).to_json() | {"judgements": 0}
    keys = [table.clusters[item] for item in items]
    people = [table.annotators[column] for column in columns]
    reasons = too_few(len(set(keys)), len(set(people)), over=table.over)
    intervals = {
        "ci95": lambda: _score_interval(wins, keys, table.over),
        "ci95_annotators": lambda: (
            accuracy_interval(wins, Clusters(tuple(keys), tuple((name,) for name in people))).bounds
        ),
    }
    bounds = {name: None if name in reasons else interval() for name, interval in intervals.items()}
    return {"value": float(wins.mean()), **bounds, "reasons": reasons, "judgements": len(wins)}


def _majority(table: FirstJudgements, fits: np.ndarray) -> dict[str, Any]:
    """The share of the items whose majority is the label; items without a majority are counted apart."""
    chosen, rejected = (fits == 0).sum(axis=1), (fits == 1).sum(axis=1)
    decided = chosen != rejected
    tied = int(((chosen == rejected) & (chosen > 0)).sum())
    if not decided.any():
        return {
            "value": None,
            "ci95": None,
            "reasons": {"value": "no item has a majority"},
            "items": 0,
            "tied": tied,
        }
    wins = (chosen > rejected)[decided]
    keys = [key for key, counts in zip(table.clusters, decided, strict=True) if counts]
    reasons = {k: v for k, v in too_few(len(set(keys)), 0, over=table.over).items() if k == "ci95"}
    bounds = None if reasons else _score_interval(wins, keys, table.over)
    return {"value": float(wins.mean()), "ci95": bounds, "reasons": reasons, "items": len(wins), "tied": tied}


def _score_interval(wins: np.ndarray, keys: Sequence[str], over: str) -> list[float] | None:
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    of_row = [number[key] for key in keys]
    won = np.bincount(of_row, weights=wins).astype(np.int64)
    return clustered_interval(won, np.bincount(of_row), what=over).bounds


def _difference(table: FirstJudgements, names: Sequence[str], margin: float) -> dict[str, Any]:
    """Chosen minus rejected: the mean over items of the means over annotators, of the criteria that they rated."""
    values, keys = [], []
    for row, key in zip(table.rows, table.clusters, strict=True):
        of_item = []
        for judged in row.values():
            pairs = [judged.judgement.quality[name] for name in names]
            known = [a - b for a, b in pairs if a is not None and b is not None]
            if known:
                of_item.append(statistics.fmean(known))
        if of_item:
            values.append(statistics.fmean(of_item))
            keys.append(key)
    empty = {"difference": None, "ci90": None, "p": None, "equivalent": None, "items": len(values)}
    if not values:
        return empty | {"reason": "no item has ratings of both responses"}
    mean = mean_interval(np.array(values), keys)
    if mean.standard_error is None or mean.degrees is None:
        reasons = too_few(len(set(keys)), 0, over=table.over)
        return empty | {"difference": statistics.fmean(values), "reason": reasons["ci95"]}
    tested = tost(
        statistics.fmean(values), standard_error=mean.standard_error, degrees=mean.degrees, margin=margin
    )
    return {
        "difference": tested.estimate,
        "ci90": list(tested.ci90),
        "p": tested.p,
        "equivalent": tested.equivalent,
        "items": len(values),
        "reason": None,
    }


def _coin(heads: int, tosses: int) -> float | None:
    """The two-sided exact p-value of a fair coin."""
    from scipy.special import bdtr  # scipy takes long to import

    if not tosses:
        return None
    return float(min(1.0, 2 * bdtr(min(heads, tosses - heads), tosses, 0.5)))
