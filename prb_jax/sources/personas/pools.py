"""The written material of the benchmark, read once from the JSON files in ``text/``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from prb_jax.sources.personas.phrases import Template, Topic, compile_template


@dataclass(frozen=True)
class Pole:
    """One of the two sides of an axis of taste.

    Attributes:
      key, label: short and readable name.
      trait: what an answer of this kind does, in the third person.
      wish: how somebody who likes it says so.
      sentences: sentences of answers that show it; continuations cannot open an answer.
      posts: how its friends write about what they like.
    """

    key: str
    label: str
    trait: str
    wish: str
    sentences: tuple[Template, ...]
    continuations: frozenset[Template]
    posts: tuple[Template, ...]


@dataclass(frozen=True)
class Axis:
    """A matter of taste; level +1 is the more popular pole ``poles[0]``, level -1 is ``poles[1]``."""

    key: str
    poles: tuple[Pole, Pole]

    def pole(self, level: int) -> Pole:
        """The side that a level of +1 or -1 stands for."""
        return self.poles[0] if level > 0 else self.poles[1]


@dataclass(frozen=True)
class Flaw:
    """A way in which an answer is bad for everyone; ``trait`` says what such an answer does."""

    key: str
    trait: str
    sentences: tuple[Template, ...]


@dataclass(frozen=True)
class Pools:
    """Everything that texts are written from."""

    axes: tuple[Axis, ...]
    topics: tuple[Topic, ...]
    questions: tuple[Template, ...]
    neutral: tuple[Template, ...]
    contexts: tuple[Template, ...]
    backgrounds: tuple[str, ...]
    flaws: tuple[Flaw, ...]

    def topics_of(self, split: str) -> tuple[Topic, ...]:
        """The topics of "train" or "test"."""
        return tuple(t for t in self.topics if t.split == split)


@cache
def load_pools() -> Pools:
    """Read and compile all material."""
    root = resources.files("prb_jax.sources.personas") / "text"

    def read(*path: str) -> Any:
        return json.loads(root.joinpath(*path).read_text(encoding="utf-8"))

    domains = sorted(entry.name for entry in (root / "domains").iterdir() if entry.name.endswith(".json"))
    frames = read("frames.json")
    return Pools(
        axes=tuple(_axis(raw) for raw in read("axes.json")),
        topics=tuple(topic for name in domains for topic in _topics(read("domains", name))),
        questions=_compile(frames["questions"]),
        neutral=_compile(frames["neutral"]),
        contexts=_compile(frames["contexts"]),
        backgrounds=tuple(frames["backgrounds"]),
        flaws=tuple(Flaw(raw["key"], raw["trait"], _compile(raw["sentences"])) for raw in read("flaws.json")),
    )


@cache
def load_new_wording() -> Pools:
    """Read the same axes and topics in other words: posts, answers, questions and people of `test-unseen-wording`."""
    pools = load_pools()
    found = json.loads(
        (resources.files("prb_jax.sources.personas") / "text/new_wording.json").read_text("utf-8")
    )

    def reworded(pole: Pole) -> Pole:
        words = found["poles"][pole.key]
        sentences, posts = _compile(words["sentences"]), _compile(words["posts"])
        return replace(pole, sentences=sentences, continuations=frozenset(), posts=posts)

    return replace(
        pools,
        axes=tuple(Axis(axis.key, (reworded(axis.poles[0]), reworded(axis.poles[1]))) for axis in pools.axes),
        questions=_compile(found["questions"]),
        neutral=_compile(found["neutral"]),
        contexts=_compile(found["contexts"]),
        backgrounds=tuple(found["backgrounds"]),
    )


def _compile(sources: list[str]) -> tuple[Template, ...]:
    return tuple(compile_template(source) for source in sources)


def _axis(raw: dict[str, Any]) -> Axis:
    first, second = (_pole(pole) for pole in raw["poles"])
    return Axis(raw["key"], (first, second))


def _pole(raw: dict[str, Any]) -> Pole:
    continuations = _compile(raw["continuations"])
    return Pole(
        key=raw["key"],
        label=raw["label"],
        trait=raw["trait"],
        wish=raw["wish"],
        sentences=_compile(raw["sentences"]) + continuations,
        continuations=frozenset(continuations),
        posts=_compile(raw["posts"]),
    )


def _topics(raw: dict[str, Any]) -> list[Topic]:
    phrases = {name: _compile(sources) for name, sources in raw["phrases"].items()}
    return [
        Topic(
            domain=raw["domain"],
            thing=topic["thing"],
            goal=topic["goal"],
            woe=topic["woe"],
            trap=topic["trap"],
            fact=topic["fact"],
            tasks=tuple(topic["steps"]),
            phrases=phrases,
            split=topic["split"],
        )
        for topic in raw["topics"]
    ]
