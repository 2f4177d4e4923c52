"""The chosen answer cannot be told by its surface: neither by its length, nor by layout and wrappers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from prb_jax.building.gates.gate import Figure, Pair, chance_figure
from prb_jax.metrics.surface import SURFACE, count_words, surface_features
from prb_jax.scoring.comparison_table import clusters_of

_FOLDS: Final = 5
_PENALTY: Final = 5.0
"""Added to the squared standardised differences: pairs that speak against a weight."""


def measure_length(pairs: Sequence[Pair], *, level: float) -> Figure:
    """Return the share of pairs whose chosen answer is longer, which must be 0.5 within its interval over users."""
    words = np.array([[count_words(pair.chosen), count_words(pair.rejected)] for pair in pairs]).reshape(
        -1, 2
    )
    values = (np.sign(words[:, 0] - words[:, 1]) + 1) / 2
    means = words.mean(0) if pairs else (0.0, 0.0)
    note = f"{means[0]:.1f} words chosen, {means[1]:.1f} rejected"
    return chance_figure(values.tolist(), pairs, level=level, either_way=True, note=note)


def measure_style(pairs: Sequence[Pair], *, level: float) -> Figure:
    """Return the accuracy of a classifier of the surface, which must not be above 0.5 beyond its interval."""
    if not pairs:
        return chance_figure([], pairs, level=level, either_way=False)
    sides = ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs])
    deltas = surface_features(sides[0]) - surface_features(sides[1])
    scale = np.sqrt((deltas**2).mean(0))
    deltas = deltas / np.where(scale > 0, scale, 1.0)
    folds = _folds(pairs)
    values = np.full(len(pairs), 0.5)
    for fold in range(_FOLDS):
        inside = folds == fold
        if inside.any() and not inside.all():
            values[inside] = (np.sign(deltas[inside] @ _fit(deltas[~inside])) + 1) / 2
    weights = _fit(deltas)
    strongest = int(np.argmax(np.abs(weights * np.abs(deltas).mean(0))))
    way = "more" if weights[strongest] > 0 else "less"
    note = f"tells most: chosen answers have {way} of {SURFACE[strongest]!r}" if weights.any() else ""
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
