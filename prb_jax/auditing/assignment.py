"""Which item an annotator is given next: every item to n people, and checks of attention in between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prb_jax.auditing.items import Item

LEAST_BETWEEN = 5
"""An item is shown again after so many others, or more."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How items are given out.

    Attributes:
      per_item: people who judge each item.
      check_every: one judgement in so many is a check, on average: a gold item, or an item that the annotator has
        judged before; 0 for none.
      seed: of orders and checks.
    """

    per_item: int = 3
    check_every: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Done:
    """One judgement of an annotator: the number of an item, and how often it was shown before."""

    item: int
    showing: int


@dataclass
class Standing:
    """Who has judged what.

    Attributes:
      items: of the audit; the one with number n at place n - 1.
      done: the judgements of each annotator, in their order.
      judged: how many people have judged each item.
    """

    items: Sequence[Item]
    done: dict[str, list[Done]] = field(default_factory=dict)
    judged: Counter[int] = field(default_factory=Counter)

    def add(self, annotator: str, done: Done) -> None:
        """Count a judgement."""
        self.done.setdefault(annotator, []).append(done)
        self.judged[done.item] += done.showing == 0

    def is_gold(self, item: int) -> bool:
        """Whether the item of this number is a gold item."""
        return self.items[item - 1].kind == "gold"

    def take_back(self, annotator: str) -> Done:
        """Take the last judgement of an annotator back, and return it."""
        done = self.done[annotator].pop()
        self.judged[done.item] -= done.showing == 0
        return done


def choose(standing: Standing, annotator: str, plan: Plan, leased: Mapping[int, int]) -> Done | None:
    """Return what an annotator is to judge next; None where nothing is left.

    Items that others have judged or hold come first, so that as many items as possible are complete at any time. Among
    equal ones every annotator has an order of his own.

    Args:
      standing: who has judged what.
      annotator: who asks.
      plan: how items are given out.
      leased: how many others hold each item now.
    """
    past = standing.done.get(annotator, [])
    if (check := _check(standing, annotator, past, plan)) is not None:
        return check
    known = {done.item for done in past}
    free = []
    for item in standing.items:
        if item.kind == "item" and item.number not in known:
            people = standing.judged[item.number] + leased.get(item.number, 0)
            if people < plan.per_item:
                free.append((-people, item.number))
    if not free:
        return None
    first = min(free)[0]
    equal = [number for people, number in free if people == first]
    return Done(_random(plan.seed, "item", annotator, len(past)).choice(equal), 0)


def still_open(standing: Standing, annotator: str, plan: Plan, leased: Mapping[int, int]) -> int:
    """Return how many items this annotator could still be given."""
    known = {done.item for done in standing.done.get(annotator, [])}
    return sum(
        item.kind == "item"
        and item.number not in known
        and standing.judged[item.number] + leased.get(item.number, 0) < plan.per_item
        for item in standing.items
    )


def _check(standing: Standing, annotator: str, past: Sequence[Done], plan: Plan) -> Done | None:
    """A gold item, or an item to judge once more, where one is due."""
    if plan.check_every < 1 or not past or past[-1].showing or standing.is_gold(past[-1].item):
        return None  # never two in a row
    rng = _random(plan.seed, "check", annotator, len(past))
    if rng.random() * plan.check_every >= 1:
        return None
    counts = Counter(done.item for done in past)
    again = [
        done.item
        for done in past[:-LEAST_BETWEEN]
        if counts[done.item] == 1 and not standing.is_gold(done.item)
    ]
    gold = [item.number for item in standing.items if item.kind == "gold" and not counts[item.number]]
    repeats = sum(done.showing > 0 for done in past)
    golds = sum(standing.is_gold(done.item) for done in past)
    choices = gold if gold and (golds <= repeats or not again) else again
    if not choices:
        return None
    item = rng.choice(choices)
    return Done(item, counts[item])


def _random(seed: int, *parts: object) -> random.Random:
    return random.Random(repr((seed, *parts)))
