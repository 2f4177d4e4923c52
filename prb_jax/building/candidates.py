"""The answers that were written for one side of a pair, and the two of a pair that are most alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from prb_jax.building.gates.answers import copied_words, refusal, truncation
from prb_jax.building.settings import SIDES, BuildSettings
from prb_jax.data.comparison import RubricAspect
from prb_jax.metrics.texts import count_words, surface_features

_LENGTH: Final = 20.0
"""Weight of the difference of the logarithms of the numbers of words, beside that of any other column."""

_BALANCE: Final = 0.1
"""Weight of the sum of the differences so far, so that they cancel over the pairs."""


@dataclass(frozen=True)
class Candidate:
    """One answer that was written.

    Attributes:
      text: without blanks around it.
      seed: of its draw.
      finish: why it ends.
      fault: for which it cannot be used; None where it can.
    """

    text: str
    seed: int
    finish: str | None
    fault: str | None


def fault_of(
    text: str,
    finish: str | None,
    *,
    question: str,
    aspects: Sequence[RubricAspect],
    settings: BuildSettings,
) -> str | None:
    """Return why an answer cannot be used; None where it can. A gate that is relaxed forbids no answer."""
    if not text.strip():
        return "is empty"
    writing, relax = settings.writing, settings.relax
    if "refusals" not in relax and (fault := refusal(text)):
        return fault
    if "truncations" not in relax and (fault := truncation(text, finish)):
        return fault
    words = count_words(text)
    if words < writing.least_words:
        return f"has {words} words, expected at least {writing.least_words}"
    if words > writing.most_words:
        return f"has {words} words, expected at most {writing.most_words}"
    if "copied-aspects" not in relax:
        run = copied_words(text, aspects, question=question, words=settings.gates.copied_words)
        return None if run is None else f"has words of an aspect: {run}"
    return None


def lacking(candidates: Mapping[str, Sequence[Candidate]]) -> str | None:
    """Return which sides have no answer that can be used, and why the last one cannot; None where both have one."""
    faults = {
        side: (written[-1].fault if written else "was not written")
        for side, written in candidates.items()
        if all(candidate.fault is not None for candidate in written)
    }
    return "; ".join(f"no {side} answer: {fault}" for side, fault in faults.items()) or None


def match_pairs(
    rows: Sequence[Mapping[str, Sequence[Candidate]]],
) -> list[tuple[Candidate, Candidate] | None]:
    """Return the chosen and the rejected answer of each row that are most alike; None where a side has none.

    Alike in words, layout and wrappers. Where several are nearly so, the ones are taken whose differences cancel those
    of the rows before: neither side of the whole is to be the longer one, or to have more lists.

    Args:
      rows: candidates by side, "chosen" and "rejected", in the order of the data.
    """
    total: np.ndarray | None = None
    matched: list[tuple[Candidate, Candidate] | None] = []
    for row in rows:
        chosen, rejected = (
            [candidate for candidate in row[side] if candidate.fault is None] for side in SIDES
        )
        if not chosen or not rejected:
            matched.append(None)
            continue
        columns = [surface_features([candidate.text for candidate in side]) for side in (chosen, rejected)]
        deltas = columns[0][:, None] - columns[1][None, :]
        deltas[..., 0] *= _LENGTH
        total = np.zeros(deltas.shape[-1]) if total is None else total
        costs = np.abs(deltas).sum(-1) + _BALANCE * np.abs(total + deltas).sum(-1)
        # identical answers are no pair, however alike they are
        same = np.array([[a.text == b.text for b in rejected] for a in chosen])
        place = np.unravel_index(int(np.argmin(np.where(same, np.inf, costs))), costs.shape)
        total = total + deltas[place]
        matched.append((chosen[int(place[0])], rejected[int(place[1])]))
    return matched
