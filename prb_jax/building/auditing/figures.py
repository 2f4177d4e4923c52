"""Figures of an audit: agreement, personal fit against the label, general quality, attention, adjudication.

Agreement, fit and quality use the first judgements of items. Gold items and repeated items only measure attention.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.building.auditing.items import CRITERIA, GOLD, ITEM, POINTS, is_rejected_first
from prb_jax.building.auditing.judgements import LABELS, AuditState, Judgement
from prb_jax.metrics.annotators import (
    MISSING,
    ORDINAL,
    Estimate,
    agreement_with_intervals,
    cohen_with_interval,
    too_few,
)
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.paired import mcnemar_p, tost
from prb_jax.metrics.uncertainty import accuracy_interval, mean_interval

FAR_APART: Final = 3  # rating difference in points from which an item goes to adjudication


@dataclass(frozen=True)
class FirstJudgements:
    """First judgements of items: one row per judged item, by annotator.

    ``clusters`` are the users of the items, or the items themselves if not all name a user; ``over`` is their plural
    name.
    """

    rows: Sequence[Mapping[str, Judgement]]
    annotators: Sequence[str]
    clusters: Sequence[str]
    over: str

    def numbers(self, value: Callable[[Judgement], int | None]) -> np.ndarray:
        """Return a table [items, annotators] of one number per judgement, ``MISSING`` for None."""
        values = [
            [value(row[name]) if name in row else None for name in self.annotators] for row in self.rows
        ]
        numbers = [[MISSING if number is None else number for number in line] for line in values]
        return np.array(numbers, np.int64).reshape(len(self.rows), len(self.annotators))


def make_table(state: AuditState) -> FirstJudgements:
    """Return the first judgements of items, in the order of the items."""
    by_item: dict[int, dict[str, Judgement]] = defaultdict(dict)
    for judged in state.judged:
        if judged.showing == 0 and judged.item.kind == ITEM:
            by_item[judged.item.number][judged.annotator] = judged
    rows = [by_item[number] for number in sorted(by_item)]
    items = [next(iter(row.values())).item for row in rows]
    users = [item.shown["user_id"] for item in items]
    by_user = bool(users) and all(user is not None for user in users) and len(set(users)) < len(users)
    names = dict.fromkeys(judged.annotator for judged in state.judged)
    return FirstJudgements(
        rows=rows,
        annotators=[name for name in names if any(name in row for row in rows)],
        clusters=users if by_user else [item.id for item in items],
        over="users" if by_user else "items",
    )


def fit_figures(table: FirstJudgements, *, seed: int) -> dict[str, Any]:
    """Return agreement on personal fit, and how often it matches the label."""
    fits = table.numbers(lambda judged: judged.fit)
    # Annotators do not know which response is labelled, so their categories are two responses in random order.
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
    """Return agreement on general quality, and chosen minus rejected with two one-sided tests of equivalence."""
    figures: dict[str, Any] = {}
    for name in CRITERIA:
        sides = [
            table.numbers(lambda judged, name=name, side=side: judged.quality[name][side])
            for side in range(2)
        ]
        agreement = agreement_with_intervals(
            np.concatenate([np.where(ratings == MISSING, MISSING, ratings - POINTS[0]) for ratings in sides]),
            categories=len(POINTS),
            level=ORDINAL,
            clusters=[*table.clusters, *table.clusters],
            over=table.over,
            seed=seed,
        )
        figures[name] = {"alpha": agreement["alpha"].to_json(), **_difference(table, (name,), margin)}
    return {"overall": _difference(table, CRITERIA, margin), "criteria": figures}


def attention_figures(state: AuditState, name: str) -> dict[str, Any]:
    """Return how much an annotator judged, and how attentively."""
    judgements = [judged for judged in state.judged if judged.annotator == name]
    checks = [judged for judged in state.checks if judged.annotator == name]
    gold = [judged for judged in checks if judged.item.kind == GOLD]
    first = {judged.item.number: judged for judged in judgements if judged.showing == 0}
    again = [
        (first[check.item.number], check) for check in checks if check.showing and check.item.number in first
    ]
    known = [judged for judged in judgements if judged.fit is not None]
    chose_a = sum((judged.fit == 1) == judged.swapped for judged in known)
    ratings = [
        abs(x - y)
        for before, after in again
        for criterion in CRITERIA
        for x, y in zip(before.quality[criterion], after.quality[criterion], strict=True)
        if x is not None and y is not None
    ]
    return {
        "name": name,
        "judgements": len(judgements),
        "cannot_tell": len(judgements) - len(known),
        "gold_right": sum(judged.fit == 0 for judged in gold),
        "gold": len(gold),
        "again_same": sum(before.fit == after.fit for before, after in again),
        "again": len(again),
        "again_rating_difference": statistics.fmean(ratings) if ratings else None,
        "chose_a": chose_a,
        "chose": len(known),
        "chose_a_p": float(mcnemar_p(chose_a, len(known) - chose_a)) if known else None,  # of a fair coin
        "median_seconds": statistics.median(judged.at - judged.opened for judged in judgements),
    }


def adjudication_queue(table: FirstJudgements) -> list[dict[str, Any]]:
    """Return the items on which annotators disagree with each other or with the label, most disputed first."""
    queue = []
    for row in table.rows:
        fits = [judged.fit for judged in row.values() if judged.fit is not None]
        chosen, rejected = fits.count(0), fits.count(1)
        if not (reasons := list(_reasons(row, chosen, rejected))):
            continue
        item = next(iter(row.values())).item
        queue.append(
            {
                "id": item.id,
                "question": item.shown["prompt"][-1]["content"],
                "user_id": item.shown["user_id"],
                "dispute": min(chosen, rejected) / max(len(fits), 1),
                "reasons": reasons,
                "fit": {name: None if one.fit is None else LABELS[one.fit] for name, one in row.items()},
                "comments": {name: one.comment for name, one in row.items() if one.comment},
            }
        )
    queue.sort(key=lambda entry: (-entry["dispute"], -len(entry["reasons"])))
    return queue


def _reasons(row: Mapping[str, Judgement], chosen: int, rejected: int) -> Iterator[str]:
    """Yield the reasons for adjudication; ``chosen`` and ``rejected`` count the annotators per response."""
    if chosen and rejected:
        yield "the annotators disagree about the personal fit"
    if rejected > chosen:
        yield "the majority differs from the label"
    if not chosen and not rejected:
        yield "nobody can tell the personal fit"
    for name in CRITERIA:
        for side, called in enumerate(LABELS):
            of_side = (judged.quality[name][side] for judged in row.values())
            ratings = [rating for rating in of_side if rating is not None]
            if ratings and max(ratings) - min(ratings) >= FAR_APART:
                yield f"{name} of the {called} response: ratings from {min(ratings)} to {max(ratings)}"


def _against_label(table: FirstJudgements, fits: np.ndarray) -> dict[str, Any]:
    """Return the share of all judgements of personal fit that match the label."""
    items, columns = (indices.tolist() for indices in np.nonzero(fits != MISSING))
    wins = fits[items, columns] == 0
    if not len(wins):
        return Estimate(None, reasons={"value": "no judgement of personal fit"}).to_json() | {"judgements": 0}
    keys, people = [table.clusters[item] for item in items], [(table.annotators[c],) for c in columns]
    reasons = too_few(len(set(keys)), len(set(people)), over=table.over)
    bounds: dict[str, Any] = {"ci95": None, "ci95_annotators": None}
    if "ci95" not in reasons:
        bounds["ci95"] = accuracy_interval(wins, Clusters(tuple(keys))).bounds
    if "ci95_annotators" not in reasons:
        bounds["ci95_annotators"] = accuracy_interval(wins, Clusters(tuple(keys), tuple(people))).bounds
    return {"value": float(wins.mean()), **bounds, "reasons": reasons, "judgements": len(wins)}


def _majority(table: FirstJudgements, fits: np.ndarray) -> dict[str, Any]:
    """Return the share of items whose majority matches the label; items without a majority are counted separately."""
    chosen, rejected = (fits == 0).sum(axis=1), (fits == 1).sum(axis=1)
    decided = chosen != rejected
    wins = (chosen > rejected)[decided]
    counts = {"items": len(wins), "tied": int(((chosen == rejected) & (chosen > 0)).sum())}
    if not len(wins):
        return {"value": None, "ci95": None, "reasons": {"value": "no item has a majority"}} | counts
    keys = [key for key, counted in zip(table.clusters, decided, strict=True) if counted]
    reasons = {k: v for k, v in too_few(len(set(keys)), 0, over=table.over).items() if k == "ci95"}
    bounds = None if reasons else accuracy_interval(wins, Clusters(tuple(keys))).bounds
    return {"value": float(wins.mean()), "ci95": bounds, "reasons": reasons} | counts


def _difference(table: FirstJudgements, names: Sequence[str], margin: float) -> dict[str, Any]:
    """Return chosen minus rejected: the mean over items of the means over annotators, of the criteria they rated."""
    values, keys = [], []
    for row, key in zip(table.rows, table.clusters, strict=True):
        of_item = []
        for judged in row.values():
            pairs = [judged.quality[name] for name in names]
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
    error, degrees = mean.standard_error, mean.degrees
    tested = tost(statistics.fmean(values), standard_error=error, degrees=degrees, margin=margin)
    verdict = {"ci90": list(tested.ci90), "p": tested.p, "equivalent": tested.equivalent}
    return {"difference": tested.estimate, **verdict, "items": len(values), "reason": None}
