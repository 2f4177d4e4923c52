"""What share of the intervals holds the true value: the table of `docs/statistics.md`.

python -m tests.metrics.simulation --repeats 1000      # or `make intervals`
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.uncertainty import difference_interval, score_test

USERS = (6, 10, 20, 50, 100)
PAIRS = (3, 10, 60)
MEANS = (0.5, 0.65, 0.8, 0.9, 0.97)
SPREADS = (0.0, 0.05, 0.1, 0.15, 0.2)


def cells():
    """Yield each mean and standard deviation of the users' rates that a beta distribution can have."""
    for mean, spread in itertools.product(MEANS, SPREADS):
        if spread**2 < 0.95 * mean * (1 - mean):
            yield mean, spread


def rates(rng, mean, spread, shape):
    """The users' true rates."""
    if spread == 0:
        return np.full(shape, mean)
    size = mean * (1 - mean) / spread**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, shape)


def coverage(users, pairs, mean, spread, *, repeats, seed=0, per_cluster=False):
    """The share of ``repeats`` intervals that hold the mean; ``pairs`` is a number, or the numbers of all users."""
    rng = np.random.default_rng([seed, users, int(np.sum(pairs)), int(1000 * mean), int(1000 * spread)])
    rows = np.broadcast_to(pairs, (users,))
    hits = 0
    for own in rates(rng, mean, spread, (repeats, users)):
        _, excess = score_test(rng.binomial(rows, own), rows, per_cluster=per_cluster)
        hits += excess(mean) <= 0
    return hits / repeats


def difference_coverage(users, pairs, better, spread, *, repeats, seed=0):
    """The share of the intervals of a paired difference that hold it.

    A user's rows are won by both models, by the first or the second alone, or by none; the difference of the
    two users' rates has the mean ``better`` and the standard deviation ``spread``.
    """
    rng = np.random.default_rng(seed)
    clusters = Clusters(tuple(f"u{i}" for i in np.repeat(np.arange(users), pairs)))
    hits = 0
    for _ in range(repeats):
        own = np.clip(rng.normal(better, spread, users), -0.3, 0.3)
        changed = np.repeat(0.35 + 0 * own, pairs)
        signs = rng.random(users * pairs) < (1 + np.repeat(own, pairs) / changed) / 2
        gains = np.where(rng.random(users * pairs) < changed, np.where(signs, 1, -1), 0)
        low, high = difference_interval(gains, clusters).bounds or (0, 0)
        hits += low <= better <= high
    return hits / repeats


def table(repeats):
    """Yield the lines of the table: the lowest and the highest coverage over all means and spreads."""
    yield "| users | " + " | ".join(f"{pairs} pairs" for pairs in PAIRS) + " |"
    yield "|---|" + "---|" * len(PAIRS)
    for users in USERS:
        found = []
        for pairs in PAIRS:
            shares = [
                (coverage(users, pairs, mean, spread, repeats=repeats), mean, spread)
                for mean, spread in cells()
            ]
            (low, *at_low), (high, *at_high) = min(shares), max(shares)
            found.append(f"{low:.3f} ({at_low[0]}, {at_low[1]}) to {high:.3f} ({at_high[0]}, {at_high[1]})")
        yield f"| {users} | " + " | ".join(found) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    for line in table(parser.parse_args().repeats):
        print(line, flush=True)
