"""Seeded draws, and sentence templates: ``[one|another]`` is a choice, ``{name}`` is filled from the topic at hand.

A capital initial (``{Fact}``) asks for a capital in the text. ``{s}``, ``{t}`` and ``{m}`` each take a
task of the topic that this text has not used yet: as it is, one that addresses nobody (fit for "people
who ..."), and one turned to the first person ("your" becomes "my"). Several tasks in one sentence keep
the order that the topic gives them, so that what is called second does come second.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

T = TypeVar("T")

TASK_SLOTS: Final = ("s", "t", "m")
_ONCE: Final = ("woe", "trap", "fact")
_TOKEN: Final = re.compile(r"\[([^\]{}]*)\]|\{(\w+)\}")
_ADDRESS: Final = re.compile(r"\byou(r|rs|rself)?\b")
_FIRST_PERSON: Final = (
    (re.compile(r"\byou are\b"), "I am"),
    (re.compile(r"\byourself\b"), "myself"),
    (re.compile(r"\byour\b"), "my"),
    (re.compile(r"\b(behind|beside|to) you\b|\byou$"), lambda found: f"{found[1]} me" if found[1] else "me"),
    (re.compile(r"\byou\b"), "I"),
)


class Draws:
    """A stream of random choices, the same on every platform and Python version.

    Only ``random.Random.random`` is used, the one method that Python promises to keep stable for an integer seed.
    """

    def __init__(self, seed: int) -> None:
        self._uniform = random.Random(seed).random

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1."""
        return int(self._uniform() * n)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._uniform() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a random order (Fisher-Yates); the argument is left as it is."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result

    def some(self, items: Sequence[T], n: int) -> list[T]:
        """``n`` different items in a random order."""
        left = list(items)
        for place in range(n):
            other = place + self.below(len(left) - place)
            left[place], left[other] = left[other], left[place]
        return left[:n]


class RunOut(Exception):
    """The topic has nothing left for a slot; the caller writes the text anew."""


@dataclass(frozen=True)
class Slot:
    """A place to fill; ``capital`` if the filling starts a sentence."""

    name: str
    capital: bool


@dataclass(frozen=True, eq=False)
class Sentence:
    """A compiled sentence: literal text (str), choices (tuple) and slots in order; ``tasks`` are its task slots."""

    source: str
    parts: tuple[str | tuple[str, ...] | Slot, ...]
    tasks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Topic:
    """Material on one subject, in phrases of fixed grammatical form."""

    domain: str  # label of the domain, as "cooking"
    thing: str  # noun phrase, never used as a subject that a verb must agree with
    goal: str  # a verb phrase in the base form
    woe: str  # a clause in the first person
    trap: str  # a gerund phrase
    fact: str  # a clause
    tasks: tuple[str, ...]  # verb phrases in the base form; tasks in the order in which they are done
    phrases: Mapping[str, tuple[Sentence, ...]]  # the domain's own phrases by slot name
    split: str  # "train" or "test"

    @cached_property
    def impersonal(self) -> frozenset[int]:
        """Indices of the tasks that address nobody."""
        return frozenset(i for i, task in enumerate(self.tasks) if not _ADDRESS.search(task))


def compile_template(source: str) -> Sentence:
    """Read the notation described at the top of this module."""
    parts: list[str | tuple[str, ...] | Slot] = []
    # a literal, choices or None, a slot or None, the next literal ...
    texts = [*_TOKEN.split(source), None, None]
    for literal, choices, name in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        if literal:
            parts.append(literal)
        if choices is not None:
            parts.append(tuple(choices.split("|")))
        elif name is not None:
            parts.append(Slot(name.lower(), name[0].isupper()))
    tasks = tuple(p.name for p in parts if isinstance(p, Slot) and p.name in TASK_SLOTS)
    return Sentence(source, tuple(parts), tasks)


def task_order(draws: Draws, topic: Topic) -> list[int]:
    """The indices of the topic's tasks in a random order."""
    return draws.shuffled(range(len(topic.tasks)))


class Supply:
    """The unused material of one text's topic: each task, fact and phrase is used at most once.

    ``order`` is the order of tasks; texts with the same order have much content in common.
    ``fixed`` gives slots a set value for the whole text.
    """

    def __init__(
        self,
        draws: Draws,
        topic: Topic,
        *,
        order: Sequence[int] | None = None,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._draws, self._topic = draws, topic
        self._tasks = list(order or task_order(draws, topic))
        self._fixed = {"thing": topic.thing, "goal": topic.goal, **(fixed or {})}
        self._once = {name: getattr(topic, name) for name in _ONCE}
        self._left: dict[str, list[Sentence]] = {}

    def fill(self, template: Sentence) -> str:
        """The template as text.

        Raises:
          RunOut: Nothing is left for a slot.
        """
        tasks = self._take_tasks(template.tasks) if template.tasks else []
        words = []
        for part in template.parts:
            if isinstance(part, str):
                words.append(part)
            elif isinstance(part, tuple):
                words.append(self._draws.pick(part))
            else:
                text = tasks.pop(0) if part.name in TASK_SLOTS else self._value(part.name)
                words.append(text[0].upper() + text[1:] if part.capital else text)
        return "".join(words)

    def _take_tasks(self, slots: tuple[str, ...]) -> list[str]:
        usable = [i for i in self._tasks if "t" not in slots or i in self._topic.impersonal]
        if len(usable) < len(slots):
            raise RunOut
        taken = sorted(usable[: len(slots)])
        self._tasks = [i for i in self._tasks if i not in taken]
        texts = [self._topic.tasks[i] for i in taken]
        return [first_person(text) if slot == "m" else text for slot, text in zip(slots, texts, strict=True)]

    def _value(self, name: str) -> str:
        if name in self._fixed:
            return self._fixed[name]
        if name in _ONCE:
            if name not in self._once:
                raise RunOut
            return self._once.pop(name)
        if name not in self._left:
            self._left[name] = self._draws.shuffled(self._topic.phrases[name])
        if not self._left[name]:
            raise RunOut
        return self.fill(self._left[name].pop())


def first_person(task: str) -> str:
    """Turn "read your notes" to "read my notes"."""
    for pattern, replacement in _FIRST_PERSON:
        task = pattern.sub(replacement, task)
    return task
