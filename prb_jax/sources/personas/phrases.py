"""Sentence templates: ``[one|another]`` is a choice, ``{name}`` is filled from the topic at hand.

A capital initial (``{Fact}``) asks for a capital in the text. ``{s}``, ``{t}`` and ``{m}`` each take a
task of the topic that this text has not used yet: as it is, one that addresses nobody (fit for "people
who ..."), and one turned to the first person ("your" becomes "my"). Several tasks in one sentence keep
the order that the topic gives them, so that what is called second does come second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from prb_jax.sources.personas.draws import Draws

TASK_SLOTS = ("s", "t", "m")
_TOKEN = re.compile(r"\[([^\]{}]*)\]|\{(\w+)\}")
_ADDRESS = re.compile(r"\byou(r|rs|rself)?\b")
_FIRST_PERSON = (
    (re.compile(r"\byou are\b"), "I am"),
    (re.compile(r"\byourself\b"), "myself"),
    (re.compile(r"\byour\b"), "my"),
    (re.compile(r"\b(behind|beside|to) you\b|\byou$"), lambda found: f"{found[1]} me" if found[1] else "me"),
    (re.compile(r"\byou\b"), "I"),
)


class RunOut(Exception):
    """The topic has nothing left for a slot; the caller writes the text anew."""


@dataclass(frozen=True, eq=False)
class Template:
    """A compiled sentence: literal text (str), choices (tuple) and slots (Slot) in order."""

    source: str
    parts: tuple[str | tuple[str, ...] | Slot, ...]
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Slot:
    """A place to fill; ``capital`` if the filling starts a sentence."""

    name: str
    capital: bool


@dataclass(frozen=True)
class Topic:
    """What can be said about one subject, in phrases of fixed grammatical form.

    Attributes:
      domain: label of the domain, as "cooking".
      thing: noun phrase, never used as a subject that a verb must agree with.
      goal, tasks: verb phrases in the base form; tasks in the order in which they are done.
      woe: a clause in the first person. trap: a gerund phrase. fact: a clause.
      phrases: the domain's own phrases by slot name.
      split: "train" or "test".
    """

    domain: str
    thing: str
    goal: str
    woe: str
    trap: str
    fact: str
    tasks: tuple[str, ...]
    phrases: Mapping[str, tuple[Template, ...]]
    split: str

    @cached_property
    def impersonal(self) -> frozenset[int]:
        """Indices of the tasks that address nobody."""
        return frozenset(i for i, task in enumerate(self.tasks) if not _ADDRESS.search(task))


def compile_template(source: str) -> Template:
    """Read the notation described at the top of this module."""
    parts: list[str | tuple[str, ...] | Slot] = []
    end = 0
    for token in _TOKEN.finditer(source):
        if token.start() > end:
            parts.append(source[end : token.start()])
        choices, name = token.groups()
        if name is None:
            parts.append(tuple(choices.split("|")))
        else:
            parts.append(Slot(name.lower(), name[0].isupper()))
        end = token.end()
    if end < len(source):
        parts.append(source[end:])
    tasks = tuple(p.name for p in parts if isinstance(p, Slot) and p.name in TASK_SLOTS)
    return Template(source, tuple(parts), tasks)


def task_order(draws: Draws, topic: Topic) -> list[int]:
    """The indices of the topic's tasks in a random order."""
    return draws.shuffled(range(len(topic.tasks)))


class Supply:
    """What one text may still say about its topic: each task, fact and phrase serves at most once.

    ``order`` says which tasks are taken first; texts with the same order have much content in common.
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
        self._draws = draws
        self._topic = topic
        self._tasks = list(order or task_order(draws, topic))
        self._values = {"thing": topic.thing, "goal": topic.goal, **(fixed or {})}
        self._left: dict[str, list[Template]] = {}
        self._once = {"woe": topic.woe, "trap": topic.trap, "fact": topic.fact}

    def fill(self, template: Template) -> str:
        """The template as text. Raises RunOut where nothing is left for a slot."""
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
        strict = "t" in slots
        usable = [i for i in self._tasks if not strict or i in self._topic.impersonal]
        if len(usable) < len(slots):
            raise RunOut
        taken = sorted(usable[: len(slots)])
        self._tasks = [i for i in self._tasks if i not in taken]
        texts = [self._topic.tasks[i] for i in taken]
        return [first_person(text) if slot == "m" else text for slot, text in zip(slots, texts, strict=True)]

    def _value(self, name: str) -> str:
        if name in self._values:
            return self._values[name]
        if name in ("woe", "trap", "fact"):
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
