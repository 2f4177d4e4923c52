"""A classifier that sees the surface of two answers alone cannot tell which one is chosen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from prb_jax.building.gates.gate import Figure, Pair, chance_figure
from prb_jax.metrics.surface import SURFACE, surface_features
from prb_jax.scoring.clusters import clusters_of

DEFINITION: Final = (
    "accuracy of a ridge classifier of length, layout and wrappers of the two answers, fitted to the pairs of other "
    "people (five folds); it fails above 0.5 beyond chance"
)

_FOLDS: Final = 5
_PENALTY: Final = 5.0
"""Added to the squared standardised differences: pairs that speak against a weight."""


def measure(pairs: Sequence[Pair], *, level: float) -> Figure:
    """Return the accuracy, which must not be above 0.5 beyond its interval over users."""
    if not pairs:
        return chance_figure([], pairs, level=level, either_way=False)
    deltas = surface_features([pair.chosen for pair in pairs]) - surface_features(
        [pair.rejected for pair in pairs]
    )
    scale = np.sqrt((deltas**2).mean(0))
    deltas = deltas / np.where(scale > 0, scale, 1.0)
    folds = _folds(pairs)
    values = np.full(len(pairs), 0.5)
    for fold in range(_FOLDS):
        own = folds == fold
        if own.all() or not own.any():
            continue
        values[own] = (np.sign(deltas[own] @ _fit(deltas[~own])) + 1) / 2
    weights = _fit(deltas)
    told = int(np.argmax(np.abs(weights * np.abs(deltas).mean(0))))
    way = "more" if weights[told] > 0 else "less"
    note = f"tells most: chosen answers have {way} of {SURFACE[told]!r}" if weights.any() else ""
    return chance_figure(values.tolist(), pairs, level=level, either_way=False, note=note)


def _fit(deltas: np.ndarray) -> np.ndarray:
    """Weights that make the differences of chosen and rejected answers 1, shrunk."""
    gram = deltas.T @ deltas + _PENALTY * np.eye(deltas.shape[1])
    return np.linalg.solve(gram, deltas.sum(0))


def _folds(pairs: Sequence[Pair]) -> np.ndarray:
    """The fold of each pair: all of one person in one."""
    users = clusters_of([pair.comparison for pair in pairs]).users
    names = [user if user is not None else f"pair {pair.id}" for user, pair in zip(users, pairs, strict=True)]
    order = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
    place = {name: number % _FOLDS for number, name in enumerate(order)}
    return np.array([place[name] for name in names])
