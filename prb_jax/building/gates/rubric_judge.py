"""A judge who is shown the aspects finds the chosen answer, whichever is shown first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.judging import Verdicts

DEFINITION: Final = (
    "share of pairs in which the judge who knows the aspects does not prefer the chosen answer in both orders"
)


def find(pairs: Sequence[Pair], verdicts: Mapping[str, Verdicts]) -> dict[str, str]:
    """Return the pairs that the judge does not separate, or separates the other way round."""
    found = {}
    for pair in pairs:
        share = verdicts[pair.id].share
        if share == 0.0:
            found[pair.id] = f"{pair.id}: the judge prefers the rejected answer in both orders"
        elif share < 1.0:
            found[pair.id] = f"{pair.id}: the judge does not separate the answers in both orders"
    return found
