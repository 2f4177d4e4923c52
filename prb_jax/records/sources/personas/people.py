"""The people: their tastes and their earlier posts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from prb_jax.records.comparison import Post
from prb_jax.records.sources.personas.phrases import Draws, Sentence, Supply, Topic
from prb_jax.records.sources.personas.pools import Pools

SEEN = 40
UNSEEN = 10
TASTES = 4  # axes that each person cares about; the others leave them indifferent
POSTS_PER_TASTE = 40
POSTS_SHOWN = 6  # posts in the profile of one record: each taste shows in at least one of them
CONTEXT_SHARE = 0.25  # share of the posts that also mention a topic
DISENTANGLING_TRIALS = 3000


@dataclass(frozen=True)
class Utterance:
    """A post, the axis whose taste it shows, and the sentences that show it."""

    post: Post
    axis: int
    sentences: frozenset[Sentence]


@dataclass(frozen=True)
class Persona:
    """One person."""

    id: str  # "persona-01"
    seen: bool  # True if this person has records in the training part
    tastes: tuple[int, ...]  # one of -1, 0, +1 per axis; +1 likes the more popular pole, 0 does not care
    background: str  # who they are; appears only in private narratives
    history: tuple[Utterance, ...]  # what this person has written, POSTS_PER_TASTE posts for every taste

    @property
    def cares(self) -> tuple[int, ...]:
        """The axes with a taste."""
        return tuple(axis for axis, taste in enumerate(self.tastes) if taste)

    @cached_property
    def axis_of(self) -> Mapping[str, int]:
        """Axis of the taste that each post shows, by post id."""
        return {utterance.post.id: utterance.axis for utterance in self.history}

    @cached_property
    def by_axis(self) -> Mapping[int, tuple[Utterance, ...]]:
        """The history of each taste."""
        return {axis: tuple(u for u in self.history if u.axis == axis) for axis in self.cares}

    def leaning(self, levels: Sequence[int]) -> int:
        """How much an answer of these levels pleases: the sum of taste times level over the axes."""
        return sum(map(mul, self.tastes, levels))


def make_people(draws: Draws, pools: Pools) -> tuple[Persona, ...]:
    """All personas, the seen ones first. No two have the same tastes."""
    backgrounds = draws.shuffled(pools.backgrounds)
    taken: set[tuple[int, ...]] = set()
    tastes = [
        *_make_tastes(draws, SEEN, len(pools.axes), taken),
        *_make_tastes(draws, UNSEEN, len(pools.axes), taken),
    ]
    return _write_people(draws, pools, pools.topics_of("train"), tastes, backgrounds, first=1)


def make_strangers(draws: Draws, pools: Pools, people: Sequence[Persona]) -> tuple[Persona, ...]:
    """Return UNSEEN more personas with tastes different from all ``people``, who write only about test topics."""
    backgrounds = draws.shuffled(pools.backgrounds)
    tastes = _make_tastes(draws, UNSEEN, len(pools.axes), {person.tastes for person in people})
    return _write_people(draws, pools, pools.topics_of("test"), tastes, backgrounds, first=len(people) + 1)


def reword(draws: Draws, pools: Pools, people: Sequence[Persona]) -> tuple[Persona, ...]:
    """Return the same people with posts in the wording of ``pools``, under new post ids."""
    topics = pools.topics_of("train")
    return tuple(
        replace(
            person,
            history=_write_history(
                draws, pools, topics, person.tastes, person.id, first=len(person.history) + 1
            ),
        )
        for person in people
    )


def _write_people(
    draws: Draws,
    pools: Pools,
    topics: Sequence[Topic],
    tastes: Sequence[tuple[int, ...]],
    backgrounds: Sequence[str],
    *,
    first: int,
) -> tuple[Persona, ...]:
    people = []
    for number, (taste, background) in enumerate(zip(tastes, backgrounds, strict=True), start=first):
        identifier = f"persona-{number:02d}"
        history = _write_history(draws, pools, topics, taste, identifier)
        people.append(Persona(identifier, number <= SEEN, taste, background, history))
    return tuple(people)


def show_profile(draws: Draws, person: Persona) -> tuple[Post, ...]:
    """The posts that one record shows, in random order: one per taste, and more for some, in other words."""
    shown: list[Utterance] = []
    others: list[Utterance] = []
    for axis in person.cares:
        first = draws.pick(person.by_axis[axis])
        shown.append(first)
        others.append(draws.pick([u for u in person.by_axis[axis] if not u.sentences & first.sentences]))
    shown.extend(draws.some(others, POSTS_SHOWN - len(shown)))
    return tuple(utterance.post for utterance in draws.shuffled(shown))


def _make_tastes(draws: Draws, people: int, axes: int, taken: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Tastes for a group of people in which every axis has as many friends and foes as any other; none is ``taken``
    before, and all are afterwards."""
    per_axis = people * TASTES // axes
    popular = (per_axis * 11 + 19) // 20  # 55 %, rounded up: the popular pole is the more common one
    cards = [axis for axis in range(axes) for _ in range(per_axis)]
    while True:
        signs = [draws.shuffled([1] * popular + [-1] * (per_axis - popular)) for _ in range(axes)]
        result = [[0] * axes for _ in range(people)]
        for taste, hand in zip(result, _deal(draws, cards, people), strict=True):
            for axis in hand:
                taste[axis] = signs[axis].pop()
        _disentangle(draws, result)
        final = [tuple(taste) for taste in result]
        if len(set(final)) == people and not taken.intersection(final):
            taken.update(final)
            return final


def _disentangle(draws: Draws, tastes: list[list[int]]) -> None:
    """Exchange signs between people until tastes on different axes hardly go together: in a small crowd some coincide
    by chance, and a model could take one for a sign of another."""
    axes = len(tastes[0])
    for _ in range(DISENTANGLING_TRIALS):
        axis = draws.below(axes)
        one, other = draws.pick(tastes), draws.pick(tastes)
        if one[axis] * other[axis] != -1:
            continue
        change = 0
        for second in range(axes):
            if second != axis:
                together = sum(taste[axis] * taste[second] for taste in tastes)
                after = together - 2 * (one[axis] * one[second] + other[axis] * other[second])
                change += after * after - together * together
        if change < 0:
            one[axis], other[axis] = other[axis], one[axis]


def _deal(draws: Draws, cards: list[int], people: int) -> list[list[int]]:
    """TASTES different axes for each person, using up all cards."""
    cards = draws.shuffled(cards)
    hands = [cards[i * TASTES : (i + 1) * TASTES] for i in range(people)]
    for hand in hands:
        while len(set(hand)) < TASTES:
            double = next(i for i, axis in enumerate(hand) if axis in hand[:i])
            other = draws.pick(hands)
            place = draws.below(TASTES)
            if hand[double] not in other and other[place] not in hand:
                hand[double], other[place] = other[place], hand[double]
    return hands


def _write_history(
    draws: Draws,
    pools: Pools,
    topics: Sequence[Topic],
    tastes: tuple[int, ...],
    author: str,
    *,
    first: int = 1,
) -> tuple[Utterance, ...]:
    history = []
    # ids must not reveal the taste
    numbers = draws.shuffled(range(first, first + TASTES * POSTS_PER_TASTE))
    for axis, taste in enumerate(tastes):
        if not taste:
            continue
        posts = pools.axes[axis].pole(taste).posts
        rounds = -(-POSTS_PER_TASTE // len(posts))  # each template as often as any other
        for template in [t for _ in range(rounds) for t in draws.shuffled(posts)][:POSTS_PER_TASTE]:
            topic = draws.pick(topics)
            wishes = [template, draws.pick([t for t in posts if t is not template])]
            context = [draws.pick(pools.contexts)] if draws.chance(CONTEXT_SHARE) else []
            supply = Supply(draws, topic)
            text = " ".join(supply.fill(sentence) for sentence in (*context, *wishes))
            post = Post(id=f"{author}-post-{numbers.pop():03d}", text=text, category=topic.domain)
            history.append(Utterance(post, axis, frozenset(wishes)))
    return tuple(history)
