"""The best accuracies anyone can reach, computed from the records and from their design."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prb_jax.data.comparison import Comparison
from prb_jax.sources.personas.design import SLIP_SHARE, Group
from prb_jax.sources.personas.people import Persona


@dataclass(frozen=True)
class Ceilings:
    """Upper bounds on accuracy over a set of personalised records.

    Attributes:
      records: how many records they hold for.
      user_blind: no function of question and answers alone exceeds this on these very records, even if
        it has seen all their labels: people who were shown the same two answers disagree, and the best
        is to side with each majority.
      user_blind_expected: the Bayes-optimal user-blind accuracy under the generating distribution:
        each majority is known, the slips are not.
      user_blind_by_style: the best that a rule can do which sees only which poles the two answers
        show, fitted to these records. It is what popular taste alone is worth on new topics.
      persona_aware: accuracy of one who knows the tastes of every person and reads the answers
        perfectly; what is missing are the slips.
    """

    records: int
    user_blind: float
    user_blind_expected: float
    user_blind_by_style: float
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
    styles: dict[tuple[int, ...], Counter[bool]] = {}
    for comparison in comparisons:
        chosen = levels[comparison.id]
        opposite = tuple(-level for level in chosen)
        styles.setdefault(max(chosen, opposite), Counter())[chosen > opposite] += 1
    return Ceilings(
        records=len(comparisons),
        user_blind=best_user_blind_accuracy(comparisons),
        user_blind_expected=expected / (sum(majority) + sum(minority)),
        user_blind_by_style=sum(max(votes.values()) for votes in styles.values()) / len(comparisons),
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
