"""Weights of `stacked` from the people who chose its numbers, and from people who did not, on planted people.

    PYTHONPATH=. python docs/stacked_weights.py 5 search nothing directions

The kinds are those of tests/personal/few_shot/test_stacked.py. For each kind it prints, over the seeds and 0, 2 and 8
choices, the largest mean log-loss above the best part, and the mean weight of `bayes`.
"""

import sys

import jax
import numpy as np

from prb_jax.personal.few_shot import bayes
from prb_jax.personal.few_shot.cross_fit import CrossFitData
from prb_jax.personal.few_shot.stacked import PARTS, StackedSettings, shares_of_best, stack, unchosen_margins
from tests.personal.few_shot.planted import sigmoid
from tests.personal.few_shot.test_stacked import people

SHOTS, KEY = (0, 2, 8), jax.random.key(0)


def losses(kind: str, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, float]]:
    """Return the expected log-loss on new people of the parts [k, P] and of both stacks [k], and weights of `bayes`."""
    made = people(kind, seed=seed)
    settings = bayes.BayesSettings(validation_shots=SHOTS)
    data = CrossFitData(bayes.METHOD, made.seen, made.validation, settings, KEY)
    parts = bayes.fit_parts(data)
    found = {"not chosen": unchosen_margins(data)}
    whole = np.stack([data.margins(parts[name])[0] for name in PARTS], axis=1)
    found["chosen"] = whole, found["not chosen"][1]
    sure, new = sigmoid(made.query_margins()), []
    for shots in SHOTS:
        scores = [made.scores(bayes.METHOD, parts[name], shots, width=max(SHOTS)) for name in PARTS]
        margins = [(each[..., 0] - each[..., 1])[made.queries.mask] for each in scores]
        new.append(np.stack(margins, axis=1).astype(np.float64))

    def loss(margins: np.ndarray) -> np.ndarray:
        one, other = np.logaddexp(0, -margins), np.logaddexp(0, margins)
        return (sure[:, None] * one + (1 - sure[:, None]) * other).mean(axis=0)

    stacks, of_bayes = {}, {}
    for name, (margins, of) in found.items():
        toward = shares_of_best(margins, of, rng=np.random.default_rng(seed))
        weights, slope = stack(margins, toward=toward, pull=StackedSettings().pull)
        stacks[name] = np.asarray([loss(slope * each @ weights[:, None])[0] for each in new])
        of_bayes[name] = float(weights[PARTS.index("bayes")])
    jax.clear_caches()
    return np.stack([loss(each) for each in new]), stacks, of_bayes


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        runs = [losses(kind, seed) for seed in range(int(sys.argv[1]))]
        best = np.mean([parts for parts, _, _ in runs], axis=0).min(axis=1)
        for name in ("chosen", "not chosen"):
            above = np.mean([stacks[name] for _, stacks, _ in runs], axis=0) - best
            weight = np.mean([weights[name] for _, _, weights in runs])
            print(
                f"{kind}, numbers {name} by these people: {above.max():+.4f}, weight of bayes {weight:.2f}",
                flush=True,
            )
