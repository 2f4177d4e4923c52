"""No answer repeats the words of an aspect: a judge who is shown the aspects would find them without reading."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.gates.words import runs, words_of
from prb_jax.data.comparison import RubricAspect

DEFINITION: Final = (
    "share of pairs with an answer that has the whole name of an aspect of three words or more, or so many consecutive "
    "words of an aspect, its evidence or its reason, as the question has not"
)

_LEAST_NAME: Final = 3


def copied(text: str, aspects: Sequence[RubricAspect], *, question: str, words: int) -> str | None:
    """Return the words that a text has from an aspect; None where it has none.

    Args:
      text: an answer.
      aspects: of its record.
      question: whose words an answer may take up.
      words: how many consecutive ones count as copied.
    """
    answer, asked = words_of(text), words_of(question)
    own = set(runs(answer, words))

    def holds(run: tuple[str, ...], inside: Sequence[str]) -> bool:
        size = len(run)
        return any(tuple(inside[k : k + size]) == run for k in range(len(inside) - size + 1))

    for aspect in aspects:
        name = tuple(words_of(aspect.aspect))
        wanted = [name] if len(name) >= _LEAST_NAME else []
        for part in (aspect.aspect, aspect.evidence, aspect.reason):
            wanted += [run for run in runs(words_of(part), words) if len(run) == words]
        for run in wanted:
            if (run in own or (len(run) != words and holds(run, answer))) and not holds(run, asked):
                return " ".join(run)
    return None


def find(pairs: Sequence[Pair], *, words: int) -> dict[str, str]:
    """Return the pairs with such an answer, and the words."""
    found = {}
    for pair in pairs:
        look = partial(
            copied, aspects=pair.comparison.rubric_aspects, question=pair.comparison.question, words=words
        )
        for side, text in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            if run := look(text):
                found[pair.id] = f"{pair.id}: the {side} answer has {run!r}"
                break
    return found
