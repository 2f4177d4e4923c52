"""Baselines of a study that need no method: the longer response, what most seen people like, the backbone's reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from prb_jax.personal.few_shot.choices import Choices
from prb_jax.study.outcomes import PLAIN, Outcome, Part
from prb_jax.study.population import Population


def _length(population: Population, part: Part) -> np.ndarray:
    return np.array([len(text) for text in population.texts], np.float64)


def _popularity(population: Population, part: Part) -> np.ndarray:
    """(wins + 1) / (times judged + 2) of each text, in the choices that methods are fitted on."""
    return popularity(part.choices.only(part.split.trained))[part.choices.items]


def _backbone(population: Population, part: Part) -> np.ndarray:
    assert part.choices.base_scores is not None
    return np.asarray(part.choices.base_scores, np.float64)


def popularity(choices: Choices) -> np.ndarray:
    """Return the shrunk share of wins of each item, float64 [items]; 0.5 for one that was never judged."""
    items = np.asarray(choices.items)
    size = int(items.max()) + 1
    won = np.bincount(items[choices.chosen], minlength=size)
    lost = np.bincount(items[choices.rejected], minlength=size)
    return (won + 1) / (won + lost + 2)


BASELINES: Final[Mapping[str, Callable[[Population, Part], np.ndarray]]] = {
    "length": _length,
    "popularity": _popularity,
    "backbone": _backbone,
}
"""The scores of the rows of features, by the name of the baseline."""


def baselines_of(population: Population) -> list[str]:
    """Return the names of the baselines that a study can have: "backbone" needs a backbone that is a reward model."""
    lacking = {"backbone"} if population.choices.base_scores is None else set()
    return [name for name in BASELINES if name not in lacking]


def run_baseline(name: str, population: Population, part: Part) -> Outcome:
    """Return the verdicts of a baseline on the queries of a split; it knows no user, and has no shots."""
    scores = BASELINES[name](population, part)
    queries, counts = part.queries, part.contexts.mask.sum(1)
    places = queries.places[queries.mask]
    chosen, rejected = scores[part.choices.chosen[places]], scores[part.choices.rejected[places]]
    return Outcome(
        places=places.astype(np.int32),
        short=np.repeat(counts, queries.mask.sum(1)).astype(np.int32),
        verdicts={(PLAIN, 0): (1 + np.sign(chosen - rejected)).astype(np.int8)},
        figures={"seconds_fit": 0.0, "seconds_adapt_per_user": 0.0, "bytes_per_user": 0},
    )
