"""The names of judges as rewards, and the words for pairs and ties that judges and configs share."""

from __future__ import annotations

from typing import Final

from prb_jax.text.view import TextProtocol

SCORE: Final = "score"
RUBRIC: Final = "rubric"
PREFIXES: Final = {"judge:": SCORE, "rubric:": RUBRIC, "pairs:": str(TextProtocol.DEFAULT)}
"""Maps the prefix of a judge's name to its protocol."""
ALL_PAIRS, CIRCULAR, KNOCK_OUT = "all", "circular", "knock-out"
PAIRINGS = (ALL_PAIRS, CIRCULAR, KNOCK_OUT)
"""Which pairs of a group's responses a judge compares."""
HALF, LOSS, MISSING = "half", "loss", "missing"
TIES = (HALF, LOSS, MISSING)
"""Value of a tie for both responses."""


def is_judge(name: object) -> bool:
    """Tell whether a reward is named as a judge."""
    return isinstance(name, str) and name.startswith(tuple(PREFIXES))
