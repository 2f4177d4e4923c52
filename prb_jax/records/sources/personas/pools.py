"""The written material of the benchmark, read once from the JSON files in ``text/``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from prb_jax.records.sources.personas.phrases import Sentence, Topic, compile_template


@dataclass(frozen=True, kw_only=True)
class Pole:
    """One of the two sides of an axis of taste."""

    key: str
    label: str  # in words
    trait: str  # description of such an answer, in the third person
    wish: str  # wish of a person who likes it
    sentences: tuple[Sentence, ...]  # sentences of answers that show it
    continuations: frozenset[Sentence]  # sentences that cannot open an answer
    posts: tuple[Sentence, ...]  # posts of people who like it


@dataclass(frozen=True)
class Axis:
    """A matter of taste; level +1 is the more popular pole ``poles[0]``, level -1 is ``poles[1]``."""

    key: str
    poles: tuple[Pole, ...]

    def pole(self, level: int) -> Pole:
        """Return the side for a level of +1 or -1."""
        return self.poles[0] if level > 0 else self.poles[1]


@dataclass(frozen=True)
class Flaw:
    """A way in which an answer is bad for everyone; ``trait`` describes such an answer."""

    key: str
    trait: str
    sentences: tuple[Sentence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Everything that texts are written from."""

    axes: tuple[Axis, ...]
    topics: tuple[Topic, ...]
    questions: tuple[Sentence, ...]
    neutral: tuple[Sentence, ...]
    contexts: tuple[Sentence, ...]
    backgrounds: tuple[str, ...]
    flaws: tuple[Flaw, ...]

    def topics_of(self, split: str) -> tuple[Topic, ...]:
        """The topics of "train" or "test"."""
        return tuple(t for t in self.topics if t.split == split)


@cache
def load_pools() -> Pools:
    """Read and compile all material."""
    topics: list[Topic] = []
    for name in sorted(entry.name for entry in (_TEXT / "domains").iterdir() if entry.name.endswith(".json")):
        raw = _read("domains", name)
        phrases = {slot: _compile(sources) for slot, sources in raw["phrases"].items()}
        topics += [
            Topic(domain=raw["domain"], phrases=phrases, tasks=tuple(topic.pop("steps")), **topic)
            for topic in raw["topics"]
        ]
    return Pools(
        axes=tuple(Axis(axis["key"], tuple(map(_pole, axis["poles"]))) for axis in _read("axes.json")),
        topics=tuple(topics),
        **_frames(_read("frames.json")),
        flaws=tuple(
            Flaw(raw["key"], raw["trait"], _compile(raw["sentences"])) for raw in _read("flaws.json")
        ),
    )


@cache
def load_wording(name: str) -> Pools:
    """Read the same axes and topics in other words: posts, answers and questions.

    Args:
      name: "more", of `train-more-wording`, or "new", of `test-unseen-wording`, which has different people.
    """
    pools, wording = load_pools(), _read(f"{name}_wording.json")

    def reworded(pole: Pole) -> Pole:
        words = {key: _compile(sources) for key, sources in wording["poles"][pole.key].items()}
        return replace(pole, continuations=frozenset(), **words)

    axes = tuple(replace(axis, poles=tuple(map(reworded, axis.poles))) for axis in pools.axes)
    return replace(pools, axes=axes, **_frames(wording))


_TEXT = resources.files("prb_jax.records.sources.personas") / "text"


def _read(*path: str) -> Any:
    return json.loads(_TEXT.joinpath(*path).read_text(encoding="utf-8"))


def _compile(sources: list[str]) -> tuple[Sentence, ...]:
    return tuple(map(compile_template, sources))


def _frames(raw: dict[str, list[str]]) -> dict[str, Any]:
    """Questions, neutral sentences and contexts, and backgrounds if there are any."""
    names = ("questions", "neutral", "contexts", "backgrounds")
    frames = {name: raw[name] for name in names if name in raw}
    return {name: tuple(t) if name == "backgrounds" else _compile(t) for name, t in frames.items()}


def _pole(raw: dict[str, Any]) -> Pole:
    continuations = _compile(raw["continuations"])
    words = {
        "sentences": _compile(raw["sentences"]) + continuations,
        "continuations": frozenset(continuations),
        "posts": _compile(raw["posts"]),
    }
    return Pole(**(raw | words))
