"""Who is asked about which kind of pair: the experiment behind the texts, and the best accuracies it allows.

Two answers to one question differ in one axis (twice as strongly) or in two. The same two answers are
shown to a group of people who disagree: to two people, one for either answer, or to three, two against
one. So nobody who looks at the texts alone can be right about more than half of the first kind and two
thirds of the second, whatever the texts say, and the share of each is set here.
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
TRIPLE_SHARE = 0.24  # share of the records that stand in groups of three
SLIP_SHARE = 0.02  # share of the records in which a person, for once, chose against their own taste


@dataclass(frozen=True)
class Group:
    """Two answers, first with ``levels`` and second with the opposite, and who judges them."""

    levels: tuple[int, ...]  # per axis, the signed number of sentences in the first answer
    # first, second: indices of the people whose tastes favour the first and the second answer
    first: tuple[int, ...]
    second: tuple[int, ...]
    # for an uneven group, +1 if the majority's answer shall be the longer one and -1 if the shorter; 0 where
    # lengths balance out by themselves
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
    # no function of question and answers alone exceeds this on these very records, even if it has seen all
    # their labels: people who were shown the same two answers disagree, and the best is to side with each
    # majority
    user_blind: float
    # the Bayes-optimal user-blind accuracy under the generating distribution: each majority is known, the
    # slips are not
    user_blind_expected: float
    # accuracy of one who knows the tastes of every person and reads the answers perfectly; what is missing
    # are the slips
    persona_aware: float


def measure_ceilings(
    comparisons: Sequence[Comparison],
    *,
    people: Sequence[Persona],
    levels: Mapping[str, tuple[int, ...]],
    groups: Sequence[Group],
) -> Ceilings:
    """The ceilings of some personalised records.

    Args:
      people: includes everybody who occurs in the records.
      levels: by record id, the levels of the chosen answer.
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
