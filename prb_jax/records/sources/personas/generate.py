"""Generate the benchmark: turn groups of judgements into records with known ceilings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from prb_jax.records.comparison import Comparison
from prb_jax.records.sources.personas.answers import (
    TEXTUAL_FLAWS,
    generic_aspects,
    generic_narrative,
    personal_aspects,
    personal_narrative,
    write_answer,
    write_flawed_pair,
    write_question,
)
from prb_jax.records.sources.personas.design import SLIP_SHARE, Ceilings, Group, measure_ceilings, plan_groups
from prb_jax.records.sources.personas.people import Persona, make_people, make_strangers, reword, show_profile
from prb_jax.records.sources.personas.phrases import Draws, T, Topic, task_order
from prb_jax.records.sources.personas.pools import Pools, load_pools, load_wording

WORDING_PART: Final = "test-unseen-wording"
"""Other people, whose posts and answers are phrased as nothing in any other part is."""
MORE_WORDING_PART: Final = "train-more-wording"
"""The people of the training part, whose posts and answers are phrased in a third way, with many more words."""
PERSONAL_PARTS: Final[Mapping[str, int]] = {"train": 7600, "test-seen": 1200, "test-unseen": 1200}
GENERIC_PARTS: Final[Mapping[str, int]] = {"generic-train": 1500, "generic-test": 500}
WORDING_PARTS: Final[Mapping[str, int]] = {WORDING_PART: 1200, MORE_WORDING_PART: 3800}
"""Made last, and from streams of their own: the other parts stay what they were before there were these ones."""
UNIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "test": ("test-seen", "test-unseen"),
    "all": (*PERSONAL_PARTS, *GENERIC_PARTS),
}
SINGLE_PARTS: Final = (*PERSONAL_PARTS, *GENERIC_PARTS, *WORDING_PARTS)
PARTS: Final = (*SINGLE_PARTS, *UNIONS)
_STREAMS: Final = (1, 2, 3, 4, 5, 50, 51)


@dataclass(frozen=True)
class Personas:
    """The generated benchmark."""

    # the records by part; "test" and "all" are unions of the others
    parts: Mapping[str, tuple[Comparison, ...]]
    people: tuple[Persona, ...]  # the personas, with their true tastes
    # levels per axis of the chosen answer, by id of each personalised record (the rejected answer has the
    # opposite levels)
    levels: Mapping[str, tuple[int, ...]]
    # the best possible accuracies of the personalised parts, of "test" and of "personal", which represents
    # the 10,000 personalised records of "all"
    ceilings: Mapping[str, Ceilings]


@dataclass(frozen=True)
class _Judgement:
    """A record before it has its place: who chose which answer to what."""

    topic: Topic
    question: str
    chosen: str
    rejected: str
    person: Persona
    levels: tuple[int, ...]


@lru_cache(maxsize=2)
def generate(seed: int = 0) -> Personas:
    """The whole benchmark, in a second or two; the latest ones are kept.

    The same seed gives the same records on every platform; 0 is the one that ``load`` serves.

    Raises:
      ValueError: The seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed: expected 0 or more, found {seed}")
    pools, new, more = load_pools(), load_wording("new"), load_wording("more")
    streams = {part: Draws(seed * 100 + n) for part, n in zip(SINGLE_PARTS, _STREAMS, strict=True)}
    people = make_people(Draws(seed * 100), pools)
    seen = tuple(person for person in people if person.seen)
    strangers = make_strangers(streams[WORDING_PART], new, people)
    crowds = dict.fromkeys(SINGLE_PARTS, seen) | {
        "test-unseen": tuple(person for person in people if not person.seen),
        "generic-test": people,
        WORDING_PART: strangers,
        MORE_WORDING_PART: reword(streams[MORE_WORDING_PART], more, seen),
    }
    people = (*people, *strangers)
    written: set[str] = set()
    parts: dict[str, tuple[Comparison, ...]] = {}
    groups: dict[str, list[Group]] = {}
    levels: dict[str, tuple[int, ...]] = {}
    for part, records in (PERSONAL_PARTS | GENERIC_PARTS | WORDING_PARTS).items():  # pyright: ignore[reportOperatorIssue]
        draws, crowd = streams[part], crowds[part]
        words = {WORDING_PART: new, MORE_WORDING_PART: more}.get(part, pools)
        topics = words.topics_of("train" if "train" in part else "test")
        if part in GENERIC_PARTS:
            parts[part] = tuple(_generic_records(draws, words, part, records, crowd, topics, written))
            continue
        groups[part] = plan_groups(draws, crowd, records=records)
        judgements = _judge(draws, words, crowd, topics, groups[part], written)
        parts[part] = tuple(_personal_record(draws, words, part, i, j) for i, j in enumerate(judgements))
        levels |= {record.id: j.levels for record, j in zip(parts[part], judgements, strict=True)}
    parts |= {name: tuple(c for part in union for c in parts[part]) for name, union in UNIONS.items()}
    measured = {part: (part,) for part in groups}
    measured |= {"test": UNIONS["test"], "personal": tuple(PERSONAL_PARTS)}
    ceilings = {
        name: measure_ceilings(
            [c for part in union for c in parts[part]],
            people=people,
            levels=levels,
            groups=[group for part in union for group in groups[part]],
        )
        for name, union in measured.items()
    }
    return Personas(MappingProxyType(parts), people, MappingProxyType(levels), MappingProxyType(ceilings))


def _judge(
    draws: Draws,
    pools: Pools,
    crowd: Sequence[Persona],
    topics: Sequence[Topic],
    groups: Sequence[Group],
    written: set[str],
) -> list[_Judgement]:
    """Write the two answers of every group, let its members choose (a few slip), and mix the results."""
    records = sum(len(group.first) + len(group.second) for group in groups)
    slips = round(records * SLIP_SHARE)
    slipped = iter(draws.shuffled([True] * slips + [False] * (records - slips)))
    subjects = _in_rounds(draws, topics)
    judgements = []
    for group in groups:
        topic = next(subjects)
        question = write_question(draws, pools, topic)
        first, second = _write_pair(draws, pools, topic, group, written)
        opposite = tuple(-level for level in group.levels)
        for members, favours_first in ((group.first, True), (group.second, False)):
            for member in members:
                if favours_first != next(slipped):
                    outcome = (first, second, crowd[member], group.levels)
                else:
                    outcome = (second, first, crowd[member], opposite)
                judgements.append(_Judgement(topic, question, *outcome))
    return draws.shuffled(judgements)


def _write_pair(draws: Draws, pools: Pools, topic: Topic, group: Group, written: set[str]) -> tuple[str, str]:
    """Two answers with the levels of the group and their opposite, unlike all written before."""
    majority = 1 if len(group.first) >= len(group.second) else -1
    axes = [
        (axis, level) for axis, level in zip(pools.axes, group.levels, strict=True) for _ in range(abs(level))
    ]
    manners = [[axis.pole(sign * level) for axis, level in axes] for sign in (1, -1)]
    while True:
        order = task_order(draws, topic)  # of both: they give much the same advice
        first, second = (write_answer(draws, pools, topic, manner, order=order) for manner in manners)
        longer = (len(first) - len(second)) * majority
        if longer * group.longer < 0 or (group.longer and not longer):
            continue
        if first not in written and second not in written:
            written.update((first, second))
            return first, second


def _personal_record(draws: Draws, pools: Pools, part: str, index: int, judgement: _Judgement) -> Comparison:
    person, topic, levels = judgement.person, judgement.topic, judgement.levels
    profile = show_profile(draws, person)
    seen = "unseen-wording" if part == WORDING_PART else "seen" if person.seen else "unseen"
    return Comparison(
        id=f"{part}-{index:04d}",
        question=judgement.question,
        chosen=judgement.chosen,
        rejected=judgement.rejected,
        user_id=person.id,
        profile=profile,
        category=topic.domain,
        subset=f"personal-{seen}",
        rubric_aspects=personal_aspects(draws, pools, person, profile, levels),
        narrative=personal_narrative(draws, pools, person, topic, levels),
    )


def _generic_records(
    draws: Draws,
    pools: Pools,
    part: str,
    records: int,
    crowd: Sequence[Persona],
    topics: Sequence[Topic],
    written: set[str],
) -> Iterator[Comparison]:
    """Pairs of a proper and a flawed answer; flaws, people, topics and lengths in equal shares."""
    flaws, people = _in_rounds(draws, pools.flaws + TEXTUAL_FLAWS), _in_rounds(draws, crowd)
    subjects, lengths = _in_rounds(draws, topics), _in_rounds(draws, (1, -1))
    for index in range(records):
        topic, flaw, person, longer = next(subjects), next(flaws), next(people), next(lengths)
        good = bad = ""
        while not good or good in written or bad in written:
            good, bad = write_flawed_pair(draws, pools, topic, flaw, longer=longer)
        written.update((good, bad))
        yield Comparison(
            id=f"{part}-{index:04d}",
            question=write_question(draws, pools, topic),
            chosen=good,
            rejected=bad,
            user_id=person.id,
            profile=show_profile(draws, person),
            category=topic.domain,
            subset="generic",
            rubric_aspects=generic_aspects(topic, flaw),
            narrative=generic_narrative(person, topic, flaw),
        )


def _in_rounds(draws: Draws, items: Sequence[T]) -> Iterator[T]:
    """The items without end, in a new random order each round."""
    while True:
        yield from draws.shuffled(items)
