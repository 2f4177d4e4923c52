"""A judge who does not know the user cannot tell the chosen answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prb_jax.building.gates.gate import Figure, Pair, chance_figure
from prb_jax.building.judging import Verdicts

DEFINITION: Final = (
    "share of pairs in which the judge who does not know the user prefers the chosen answer in both orders; no "
    "preference in both orders counts half"
)


def measure(pairs: Sequence[Pair], verdicts: Mapping[str, Verdicts], *, level: float) -> Figure:
    """Return the share, which must be 0.5 within its interval over users."""
    shares = [verdicts[pair.id].share for pair in pairs]
    decided = sum(share != 0.5 for share in shares)
    note = f"{decided:,} of {len(pairs):,} pairs decided in both orders"
    return chance_figure(shares, pairs, level=level, either_way=True, note=note)
