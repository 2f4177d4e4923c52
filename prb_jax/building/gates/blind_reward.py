"""Reward models that are shown no user cannot tell the chosen answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from prb_jax.building.gates.gate import Figure, Pair, chance_figure

DEFINITION: Final = (
    "share of pairs in which a reward model that is shown no profile gives the chosen answer the higher score; a tie "
    "counts half. Of several models the one that is farthest from 0.5"
)


def wins(
    pairs: Sequence[Pair], models: Sequence[str], *, folder: Path, progress: bool
) -> dict[str, dict[str, float]]:
    """Return by model, and by the id of a pair, 1 where the chosen answer scores higher, 0.5 for a tie, else 0.

    Args:
      pairs: to be scored.
      models: as `prb_jax.evaluate` takes them.
      folder: for the runs of the evaluations, which are continued.
      progress: shows progress on standard error.

    Raises:
      PrbError: a model cannot be loaded, or cannot score a pair.
    """
    from prb_jax.scoring.controls import without_users
    from prb_jax.scoring.evaluate import evaluate  # it is slow to import

    if not pairs:
        return {model: {} for model in models}
    shown = without_users([pair.comparison for pair in pairs])
    found = {}
    for model in models:
        key = json.dumps([model, [each.to_row() for each in shown]], sort_keys=True)
        run = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        rows = evaluate(model, shown, out=run, controls="none", progress=progress).rows
        found[model] = {row.id: 0.5 + 0.5 * float(np.sign(row.scores[0] - row.scores[1])) for row in rows}
    return found


def measure(pairs: Sequence[Pair], found: Mapping[str, Mapping[str, float]], *, level: float) -> Figure:
    """Return the share, which must be 0.5 within its interval over users, widened for several models (Bonferroni)."""
    wider = 1 - (1 - level) / len(found)
    figures = [
        chance_figure([own[pair.id] for pair in pairs], pairs, level=wider, either_way=True, note=model)
        for model, own in found.items()
    ]
    worst = max(figures, key=lambda figure: (not figure.passed, abs((figure.value or 0.0) - 0.5)))
    if worst.interval is None:
        return worst
    return replace(worst, note=", ".join(f"{each.note} {each.value:.3f}" for each in figures))
