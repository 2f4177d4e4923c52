"""How much any text pleases a person of the benchmark: the ground truth of texts that nobody has labelled.

A cue is a word, or two neighbouring words, that the sentences of one pole can hold and nothing else in the benchmark
does: no other pole, no neutral or flawed sentence, no topic. A text shows a pole by its different cues, so that saying
a thing twice counts once, and an axis counts at most 1, so repetition gains nothing.

The rule reads words and no sense: a list of cues pleases as much as a good answer.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from functools import cache
from itertools import pairwise
from types import MappingProxyType

from prb_jax.errors import DataError, quote
from prb_jax.records.sources.personas.generate import generate
from prb_jax.records.sources.personas.people import Persona
from prb_jax.records.sources.personas.phrases import Sentence, Slot
from prb_jax.records.sources.personas.pools import Pole, Pools, load_pools, load_wording

FULL = 4  # different cues that show a pole beyond doubt; fewer show it in part

_WORD = re.compile(r"[a-z0-9]+(?:['-][a-z0-9]+)*")
_OF_TOPIC = frozenset({"thing", "goal", "woe", "trap", "fact", "s", "t", "m", "x"})
"""Slots that a topic fills in any sentence."""

Cue = tuple[str, ...]


def shown_levels(text: str) -> tuple[float, ...]:
    """Return how much a text shows the poles of each axis, from -1 to +1; 0 for neither, or both alike.

    An axis has (a - b) / max(FULL, a + b) for a different cues of the popular pole and b of the other one.
    """
    cues = _cues()
    shown = [cues[cue] for cue in _runs_of(_words(text)) if cue in cues]
    counts = [[0, 0] for _ in load_pools().axes]
    for axis, sign in shown:
        counts[axis][sign < 0] += 1
    return tuple((a - b) / max(FULL, a + b) for a, b in counts)


def satisfaction(user_id: str, text: str) -> float:
    """Return how much a text pleases a generated person, from -1 to 1: the mean over the tastes of the person.

    1 is a text that serves every taste, -1 one that offends them all, and 0 one that shows nothing of either kind.

    Raises:
      DataError: there is no such person.
    """
    person = _people().get(user_id)
    if person is None:
        raise DataError(
            f"personas: no person {quote(user_id)}; expected persona-01 to persona-{len(_people())}"
        )
    levels = shown_levels(text)
    return sum(person.tastes[axis] * levels[axis] for axis in person.cares) / len(person.cares)


@cache
def _people() -> Mapping[str, Persona]:
    return {person.id: person for person in generate().people}


@cache
def _cues() -> Mapping[Cue, tuple[int, int]]:
    """Axis and sign of each cue."""
    wordings = (load_pools(), load_wording("more"), load_wording("new"))
    slots = _own_slots(wordings)
    holders: dict[Cue, set[tuple[int, int] | None]] = {}
    for pools in wordings:
        for axis, sign, pole in _poles(pools):
            owned = (name for name, owner in slots.items() if owner == (axis, sign))
            phrases = [phrase for name in owned for phrase in _phrases(pools, name)]
            for cue in _runs([*pole.sentences, *phrases]):
                holders.setdefault(cue, set()).add((axis, sign))
        for cue in _common(pools, slots):
            holders.setdefault(cue, set()).add(None)
    cues = {cue: next(iter(held)) for cue, held in holders.items() if len(held) == 1}
    return MappingProxyType({cue: held for cue, held in cues.items() if held is not None})


def _poles(pools: Pools) -> Iterable[tuple[int, int, Pole]]:
    return ((number, sign, axis.pole(sign)) for number, axis in enumerate(pools.axes) for sign in (1, -1))


def _own_slots(wordings: Iterable[Pools]) -> Mapping[str, tuple[int, int]]:
    """Return the slots that occur only in sentences of one pole, with the axis and sign of this pole."""
    users: dict[str, set[tuple[int, int]]] = {}
    for pools in wordings:
        for axis, sign, pole in _poles(pools):
            for template in pole.sentences:
                for part in template.parts:
                    if isinstance(part, Slot) and part.name not in _OF_TOPIC:
                        users.setdefault(part.name, set()).add((axis, sign))
    return {name: next(iter(poles)) for name, poles in users.items() if len(poles) == 1}


def _phrases(pools: Pools, name: str) -> list[Sentence]:
    return list({template for topic in pools.topics for template in topic.phrases.get(name, ())})


def _common(pools: Pools, owned: Container[str]) -> set[Cue]:
    """The words of everything that belongs to no pole, as the phrases of owned slots do."""
    templates = [*pools.neutral, *(sentence for flaw in pools.flaws for sentence in flaw.sentences)]
    names = {name for topic in pools.topics for name in topic.phrases if name not in owned}
    templates += [template for name in names for template in _phrases(pools, name)]
    texts = {
        text
        for topic in pools.topics
        for text in (topic.thing, topic.goal, topic.woe, topic.trap, topic.fact, *topic.tasks)
    }
    return {cue for text in texts for cue in _runs_of(_words(text))} | _runs(templates)


def _runs(templates: Iterable[Sentence]) -> set[Cue]:
    """Words and pairs of neighbours that templates can be filled to, not across a slot."""
    cues: set[Cue] = set()
    for template in templates:
        before: list[str] = []
        for part in template.parts:
            if isinstance(part, Slot):
                before = []
                continue
            ends: list[str] = []
            for option in (part,) if isinstance(part, str) else part:
                words = _words(option)
                cues |= _runs_of(words)
                cues |= {(last, words[0]) for last in before if words}
                ends += words[-1:] or before
            before = ends
    return cues


def _runs_of(words: list[str]) -> set[Cue]:
    return {*((word,) for word in words), *pairwise(words)}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
