"""Published traps as failures: a study that would fall into one of them does not run."""

from __future__ import annotations

from typing import Final

import numpy as np

from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import group_counts
from prb_jax.metrics.surface import WRAPPERS, wrapper_features
from prb_jax.metrics.uncertainty import clustered_interval
from prb_jax.study.population import Population
from prb_jax.study.splits import SEEN_PART, UNSEEN_PART, Split

LEVEL: Final = 0.999
MARGIN: Final = 0.03
"""Beyond chance, that the wrapper alone must exceed with this confidence: less than that is no leak of labels."""

NORMS: Final = 1.5
"""Most that the mean lengths of the features of seen and unseen people may differ, as a ratio."""


def check_wrappers(population: Population, split: Split) -> float:
    """Refuse data whose labels show from the wrapping of the responses alone.

    A linear classifier is fitted on the differences of the wrappers of seen people's choices, and predicts the choices
    of all other people; a tie counts as half.

    Returns:
      its accuracy.

    Raises:
      RunError: the accuracy is above chance, naming the wrapper that tells most.
    """
    choices = population.choices
    wrapped = wrapper_features(population.texts)
    deltas = wrapped[choices.chosen] - wrapped[choices.rejected]
    weights = deltas[split.trained].sum(0) / (
        np.abs(deltas[split.trained]).sum(0) + 1
    )  # of naive Bayes, shrunk
    tested = ~split.of_part(choices.users, SEEN_PART)
    found = deltas[tested] @ weights
    decided = found != 0
    accuracy = float(np.mean((found > 0) + 0.5 * ~decided))
    if not decided.any() or accuracy < 0.5 + MARGIN:
        return accuracy
    users = [population.users[user] for user in choices.users[tested]]
    counts = group_counts((found > 0)[decided], [user for user, known in zip(users, decided) if known])
    interval = clustered_interval(counts.wins, counts.rows, level=LEVEL)
    if interval.low is not None and interval.low > 0.5:
        told = max(range(len(weights)), key=lambda number: abs((deltas[tested] * weights)[:, number].sum()))
        name = list(WRAPPERS)[told]
        way = "preferred" if weights[told] > 0 else "rejected"
        raise RunError(
            f"the wrapping of the responses tells the labels: {name} alone marks the {way} ones, and a classifier that "
            f"reads nothing else is right in {accuracy:.3f} of {int(tested.sum()):,} comparisons of people that it was "
            "not fitted on (chance: 0.5). Write both responses of a comparison in the same way"
        )
    return accuracy


def check_norms(population: Population, split: Split, features: np.ndarray) -> float:
    """Refuse features that were not made alike for seen and for unseen people.

    Returns:
      the ratio of the mean length of the features that unseen people judge to that of seen people.

    Raises:
      RunError: it is above 1.5 or below 1 / 1.5.
    """
    choices = population.choices
    lengths = np.linalg.norm(features, axis=1)
    unseen = split.of_part(choices.users, UNSEEN_PART)
    here = [np.mean(lengths[[choices.chosen[p], choices.rejected[p]]]) for p in (unseen, split.trained)]
    ratio = float(here[0] / max(here[1], 1e-30))
    if not 1 / NORMS < ratio < NORMS:
        raise RunError(
            f"the features of the responses that unseen people judge are {ratio:.2f} times as long as those of seen "
            "people: the two were not made in the same way"
        )
    return ratio
