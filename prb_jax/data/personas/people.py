"""The people: their tastes, and what they have written so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prb_jax.data.comparison import Post
from prb_jax.data.personas.draws import Draws
from prb_jax.data.personas.phrases import Supply, Template, Topic
from prb_jax.data.personas.pools import Pools

SEEN = 40
UNSEEN = 10
TASTES = 5
"""Axes that each person cares about; the others leave them indifferent."""
POSTS_PER_TASTE = 40
POSTS_SHOWN = 7
"""Posts in the profile of one record: each taste shows in at least one of them."""


@dataclass(frozen=True)
class Persona:
    """One person.

    Attributes:
      id: "persona-01" ...
      seen: True if this person has records in the training part.
      tastes: one of -1, 0, +1 per axis; +1 likes the more popular pole, 0 does not care.
      background: who they are; appears only in private narratives.
      history: per axis, this person's posts that show the taste (none where the taste is 0).
    """

    id: str
    seen: bool
    tastes: tuple[int, ...]
    background: str
    history: tuple[tuple[Post, ...], ...]

    @property
    def cares(self) -> tuple[int, ...]:
        """The axes with a taste."""
        return tuple(axis for axis, taste in enumerate(self.tastes) if taste)

    def leaning(self, levels: Sequence[int]) -> int:
        """How much an answer of these levels pleases: the sum of taste times level over the axes."""
        return sum(taste * level for taste, level in zip(self.tastes, levels, strict=True))


def make_people(draws: Draws, pools: Pools) -> tuple[Persona, ...]:
    """All personas, the seen ones first. No two have the same tastes."""
    backgrounds = draws.shuffled(pools.backgrounds)
    taken: set[tuple[int, ...]] = set()
    tastes = [
        *_make_tastes(draws, SEEN, len(pools.axes), taken),
        *_make_tastes(draws, UNSEEN, len(pools.axes), taken),
    ]
    topics = pools.topics_of("train")
    people = []
    for number, (taste, background) in enumerate(zip(tastes, backgrounds, strict=True), start=1):
        identifier = f"persona-{number:02d}"
        history = _write_history(draws, pools, topics, taste, identifier)
        people.append(Persona(identifier, number <= SEEN, taste, background, history))
    return tuple(people)


def show_profile(draws: Draws, person: Persona) -> tuple[Post, ...]:
    """The posts that one record shows, in random order: one per taste, then others of this person."""
    shown: list[Post] = []
    others: list[Post] = []
    for axis in person.cares:
        first, *rest = draws.shuffled(person.history[axis])
        shown.append(first)
        others.extend(rest[:1])
    shown.extend(draws.some(others, POSTS_SHOWN - len(shown)))
    return tuple(draws.shuffled(shown))


def _make_tastes(draws: Draws, people: int, axes: int, taken: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Tastes for a group of people in which every axis has as many friends and foes as any other.

    Adds the results to ``taken``, in which none of them was before.
    """
    per_axis = people * TASTES // axes
    popular = (per_axis * 11 + 19) // 20  # 55 %, rounded up: the popular pole is the more common one
    while True:
        cards = [axis for axis in range(axes) for _ in range(per_axis)]
        hands = _deal(draws, cards, people)
        signs = [draws.shuffled([1] * popular + [-1] * (per_axis - popular)) for _ in range(axes)]
        result = []
        for hand in hands:
            taste = [0] * axes
            for axis in hand:
                taste[axis] = signs[axis].pop()
            result.append(tuple(taste))
        if len(set(result)) == people and not taken.intersection(result):
            taken.update(result)
            return result


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


def _in_turn(draws: Draws, templates: Sequence[Template]) -> list[Template]:
    """POSTS_PER_TASTE templates, each as often as any other."""
    rounds = -(-POSTS_PER_TASTE // len(templates))
    return [t for _ in range(rounds) for t in draws.shuffled(templates)][:POSTS_PER_TASTE]


def _write_history(
    draws: Draws, pools: Pools, topics: Sequence[Topic], tastes: tuple[int, ...], author: str
) -> tuple[tuple[Post, ...], ...]:
    history: list[tuple[Post, ...]] = []
    numbers = draws.shuffled(range(1, TASTES * POSTS_PER_TASTE + 1))  # an id tells nothing about the taste
    for axis, taste in zip(pools.axes, tastes, strict=True):
        posts = []
        for template in _in_turn(draws, axis.pole(taste).posts) if taste else ():
            topic = draws.pick(topics)
            supply = Supply(draws, topic)
            sentences = [supply.fill(draws.pick(pools.contexts)), supply.fill(template)]
            text = " ".join(sentences if draws.chance(0.7) else sentences[::-1])
            posts.append(Post(id=f"{author}-post-{numbers.pop():03d}", text=text, category=topic.domain))
        history.append(tuple(posts))
    return tuple(history)
