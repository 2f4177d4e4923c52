"""A linear model, persona x words: how far somebody's own choices lead who understands no word.

The score of a response is the sum of the weights of its words. Each persona of the training part has weights of its
own, which are added to those of all: a persona that has no choices in training gets the latter alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.data.comparison import Comparison

LEAST_RESPONSES = 20
"""Training responses in which a word occurs that has a weight."""
PENALTY = 3.0
"""Of the squared weights, of all and of each persona; half of it is added to the sum of the losses."""
ITERATIONS = 60

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class PersonaWords:
    """A fitted model: weights [W] of all and, by persona, weights that are added to these; ``columns`` are the places
    of the words. ``presentations`` says how often a pair was looked at in fitting."""

    columns: Mapping[str, int]
    common: np.ndarray
    own: Mapping[str | None, np.ndarray]
    presentations: int

    def __call__(self, comparison: Comparison) -> list[float]:
        """Return the scores of the responses."""
        weights = self.common + self.own.get(comparison.user_id, 0.0)
        return [
            float(sum(weights[self.columns[word]] for word in sorted(_words(text)) if word in self.columns))
            for text in comparison.responses
        ]


def fit_persona_words(pairs: Sequence[Comparison]) -> PersonaWords:
    """Fit the model to pairs of the training part: Bradley-Terry with an L2 penalty, by L-BFGS. The user of a pair is
    its persona, and no profile is read."""
    import scipy.optimize
    import scipy.sparse

    counts = Counter(word for pair in pairs for text in pair.responses for word in _words(text))
    columns = {word: i for i, word in enumerate(sorted(w for w, n in counts.items() if n >= LEAST_RESPONSES))}
    blocks: dict[str | None, int] = {}
    rows, places, values = [], [], []
    for row, pair in enumerate(pairs):
        block = blocks.setdefault(pair.user_id, 1 + len(blocks)) * len(columns)
        chosen, rejected = (
            {columns[word] for word in _words(text) if word in columns} for text in pair.responses
        )
        for sign, words in ((1.0, chosen - rejected), (-1.0, rejected - chosen)):
            for word in sorted(words):
                rows += [row, row]
                places += [word, block + word]
                values += [sign, sign]
    shape = (len(pairs), (1 + len(blocks)) * len(columns))
    features = scipy.sparse.csr_matrix((values, (rows, places)), shape)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = features @ weights
        slope = -0.5 * (1 - np.tanh(margins / 2))
        value = np.logaddexp(0, -margins).sum() + PENALTY / 2 * (weights @ weights)
        return float(value), features.T @ slope + PENALTY * weights

    start = np.zeros(shape[1])
    options = {"maxiter": ITERATIONS}
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    weights = found.x.reshape(-1, len(columns))
    own = {persona: weights[block] for persona, block in blocks.items()}
    return PersonaWords(columns, weights[0], own, presentations=found.nfev * len(pairs))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
