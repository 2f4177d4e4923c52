"""Design of the experiment: which people judge which pairs, and the best possible accuracies.

Two answers to one question differ in one axis (twice as strongly) or in two. A group of people with different opinions
judges the same two answers: two people, one for each answer, or three, two against one. So a reader of only the texts
can be right about at most half of the first kind and two thirds of the second. This module sets the share of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prb_jax.records.comparison import Comparison
from prb_jax.records.sources.personas.people import Persona
from prb_jax.records.sources.personas.phrases import Draws

PAIR_WEIGHT = 2  # levels of an answer: the number of its sentences that show a pole of the axis, signed
ONE_AXIS_SHARE = 0.6
TRIPLE_SHARE = 0.24  # share of the records in groups of three
SLIP_SHARE = 0.02  # share of the records in which a person chose against their taste (slips)


@dataclass(frozen=True)
class Group:
    """Two answers, first with ``levels`` and second with the opposite, and who judges them."""

    levels: tuple[int, ...]  # per axis, the signed number of sentences in the first answer
    # first, second: indices of the people whose tastes favour the first and the second answer
    first: tuple[int, ...]
    second: tuple[int, ...]
    # for an uneven group, +1 if the majority's answer must be longer and -1 if shorter; 0 for an even group,
    # whose lengths balance
    longer: int


def plan_groups(draws: Draws, people: Sequence[Persona], *, records: int) -> list[Group]:
    """Groups with ``records`` (an even number) judgements in all, spread evenly over people and axes."""
    triples = round(records * TRIPLE_SHARE / 6) * 2  # an even number, so that half can be longer
    sizes = draws.shuffled([3] * triples + [2] * ((records - 3 * triples) // 2))
    longer = draws.shuffled([1, -1] * (triples // 2))
    load = [0] * len(people)
    axis_use = [0] * len(people[0].tastes)
    groups = []
    for size in sizes:
        lead = min(draws.shuffled(range(len(people))), key=load.__getitem__)
        group = None
        while group is None:
            levels = _draw_levels(draws, people[lead], axis_use)
            group = _fill_group(draws, people, lead, levels, size, load)
        for member in (*group.first, *group.second):
            load[member] += 1
        for axis, level in enumerate(group.levels):
            axis_use[axis] += abs(level)
        groups.append(Group(group.levels, group.first, group.second, longer.pop() if size == 3 else 0))
    return groups


def _draw_levels(draws: Draws, lead: Persona, axis_use: Sequence[int]) -> tuple[int, ...]:
    """Levels of the first answer, such that the lead cares; axes used least so far come first."""
    axis = min(draws.shuffled(lead.cares), key=axis_use.__getitem__)
    levels = [0] * len(axis_use)
    levels[axis] = PAIR_WEIGHT
    if not draws.chance(ONE_AXIS_SHARE):
        others = [a for a in range(len(axis_use)) if a != axis]
        levels[axis] = 1
        levels[draws.pick(others)] = draws.pick((1, -1))
        if lead.leaning(levels) == 0:  # the two tastes cancel out, so the lead would toss a coin
            return _draw_levels(draws, lead, axis_use)
    return tuple(levels)


def _fill_group(
    draws: Draws,
    people: Sequence[Persona],
    lead: int,
    levels: tuple[int, ...],
    size: int,
    load: Sequence[int],
) -> Group | None:
    """The group of this size around the lead; None if too few people care."""
    order = sorted((i for i in draws.shuffled(range(len(people))) if i != lead), key=load.__getitem__)
    majority = 1
    if min(levels) < 0:  # a popular pole on either side: no side is the popular one
        majority = draws.pick((1, -1))
    wanted = {majority: size - 1, -majority: 1}
    sides: dict[int, list[int]] = {1: [], -1: []}
    for i in (lead, *order):
        leaning = people[i].leaning(levels)
        side = 1 if leaning > 0 else -1
        if leaning and len(sides[side]) < wanted[side]:
            sides[side].append(i)
        if all(len(sides[sign]) == n for sign, n in wanted.items()):
            return Group(levels, tuple(sides[1]), tuple(sides[-1]), 0)
    return None


@dataclass(frozen=True)
class Ceilings:
    """Upper bounds on accuracy over a set of personalised records."""

    records: int  # how many records they hold for
    # maximum accuracy on these records of any function of only question and answers, even with knowledge of
    # all labels: people disagree about the same two answers, and siding with each majority is best
    user_blind: float
    # the Bayes-optimal user-blind accuracy under the generating distribution: each majority is known, the
    # slips are not
    user_blind_expected: float
    # accuracy of a reader who knows every person's tastes and understands the answers perfectly; the rest
    # are slips
    persona_aware: float


def measure_ceilings(
    comparisons: Sequence[Comparison],
    *,
    people: Sequence[Persona],
    levels: Mapping[str, tuple[int, ...]],
    groups: Sequence[Group],
) -> Ceilings:
    """Return the ceilings of some personalised records.

    Args:
      people: includes everybody who occurs in the records.
      levels: Levels of the chosen answer, by record id.
      groups: the design that the records come from.
    """
    by_id = {person.id: person for person in people}
    aware = sum(by_id[str(c.user_id)].leaning(levels[c.id]) > 0 for c in comparisons)
    majority = [max(len(g.first), len(g.second)) for g in groups]
    minority = [min(len(g.first), len(g.second)) for g in groups]
    expected = sum(majority) * (1 - SLIP_SHARE) + sum(minority) * SLIP_SHARE
    return Ceilings(
        records=len(comparisons),
        user_blind=best_user_blind_accuracy(comparisons),
        user_blind_expected=expected / (sum(majority) + sum(minority)),
        persona_aware=aware / len(comparisons),
    )


def best_user_blind_accuracy(comparisons: Sequence[Comparison]) -> float:
    """The share of pairs won by siding with the majority wherever the same pair of answers recurs.

    A bound for every scorer that sees the prompt and the responses, but not the user.
    """
    votes: dict[tuple[object, ...], Counter[tuple[str, ...]]] = {}
    for comparison in comparisons:
        shown = (comparison.prompt, *sorted(comparison.responses))
        votes.setdefault(shown, Counter())[comparison.responses] += 1
    return sum(max(counts.values()) for counts in votes.values()) / len(comparisons)
