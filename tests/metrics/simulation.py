"""What share of the intervals holds the true value: the tables of `docs/statistics.md`.

python -m tests.metrics.simulation --repeats 1000      # or `make intervals`
python -m tests.metrics.simulation --repeats 2000 --methods
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit
from scipy.stats import binom

from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.clusters import Clusters, fit_correlation
from prb_jax.metrics.coverage import coverage as share_served
from prb_jax.metrics.coverage import win_tails
from prb_jax.metrics.paired import compare_rows
from prb_jax.metrics.uncertainty import accuracy_interval, difference_interval, score_test

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


def score(wins, rows, mean, *, per_cluster=False):
    """Whether the interval of `prb_jax` holds the mean."""
    _, excess = score_test(wins, rows, per_cluster=per_cluster)
    return excess(mean) <= 0


def score_with_all_degrees(wins, rows, mean):
    """The same with C - 1 degrees of freedom."""
    n, correlation = rows.sum(), fit_correlation(wins, rows)(mean)
    weights = rows / n
    variance = (weights**2 * (1 + (rows - 1) * correlation) / rows).sum()
    return (wins.sum() / n - mean) ** 2 <= quantile(len(rows)) ** 2 * mean * (1 - mean) * variance


def t_interval(wins, rows, mean):
    """Whether the t interval on the users' residuals holds the mean."""
    estimate, variance = residual_variance(wins, rows)
    return (estimate - mean) ** 2 <= quantile(len(rows)) ** 2 * variance


def wilson(wins, rows, mean):
    """Whether Wilson's interval holds the mean, with the number of independent rows that have this variance."""
    estimate, variance = residual_variance(wins, rows)
    single = estimate * (1 - estimate)
    share = variance / single if variance else 1 / rows.sum()
    return (estimate - mean) ** 2 <= quantile(len(rows)) ** 2 * share * mean * (1 - mean)


METHODS = {
    "t interval on users' residuals": t_interval,
    "Wilson's interval with the effective number of rows": wilson,
    "score interval, t with C - 1 degrees of freedom": score_with_all_degrees,
    "score interval of prb_jax": score,
}


def residual_variance(wins, rows):
    """The accuracy, and the variance of the sums of residuals by user."""
    estimate, users = wins.sum() / rows.sum(), len(rows)
    residuals = wins - estimate * rows
    return estimate, (residuals**2).sum() / rows.sum() ** 2 * users / (users - 1)


def quantile(users):
    """Of t, with a degree of freedom less than there are users."""
    return float(stdtrit(users - 1, 0.975))


def coverage(users, pairs, mean, spread, *, repeats, seed=0, method=score, **options):
    """The share of ``repeats`` intervals that hold the mean; ``pairs`` is a number, or the numbers of all users."""
    rng = np.random.default_rng([seed, users, int(np.sum(pairs)), int(1000 * mean), int(1000 * spread)])
    rows = np.broadcast_to(pairs, (users,))
    hits = 0
    for rate in rates(rng, mean, spread, (repeats, users)):
        hits += bool(method(rng.binomial(rows, rate), rows, mean, **options))
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
        gain = np.clip(rng.normal(better, spread, users), -0.3, 0.3)
        changed = np.repeat(0.35 + 0 * gain, pairs)
        signs = rng.random(users * pairs) < (1 + np.repeat(gain, pairs) / changed) / 2
        gains = np.where(rng.random(users * pairs) < changed, np.where(signs, 1, -1), 0)
        low, high = difference_interval(gains, clusters).bounds or (0, 0)
        hits += low <= better <= high
    return hits / repeats


def crossed_coverage(users, sets, rows, skew, spreads, *, repeats, mean=0.65, better=None, seed=0):
    """The share of the two-way intervals that hold the mean, where users and sets of responses are of unequal sizes.

    Users and sets have log-normal sizes (``skew`` is the standard deviation of the logarithm) and normal effects on a
    probit scale, with the standard deviations ``spreads``. With ``better`` the interval is that of a difference of two
    models, whose users and sets differ.
    """
    rng = np.random.default_rng([seed, users, sets, rows, int(10 * skew), int(10 * sum(spreads))])
    hits = 0
    for _ in range(repeats):
        sizes = np.outer(*(np.exp(skew * rng.standard_normal(count)) for count in (users, sets))).reshape(-1)
        user, item = np.divmod(rng.choice(users * sets, rows, p=sizes / sizes.sum()), sets)
        effects = [spread * rng.standard_normal(n) for spread, n in zip(spreads, (users, sets))]
        pull = effects[0][user] + effects[1][item]
        clusters = Clusters(tuple(map(str, user)), tuple((str(one),) for one in item))
        if better is None:
            total = np.sqrt(1 + spreads[0] ** 2 + spreads[1] ** 2)
            won = rng.standard_normal(rows) + pull + total * ndtri(mean) > 0
            low, high = accuracy_interval(won, clusters).bounds or (0, 0)
            hits += low <= mean <= high
        else:
            share = 0.25 + np.clip(better + 0.2 * pull, -0.5, 0.5) / 2
            drawn = rng.random(rows)
            gains = np.where(drawn < share, 1, np.where(drawn < 0.5, -1, 0))
            low, high = difference_interval(gains, clusters).bounds or (0, 0)
            hits += low <= better <= high
    return hits / repeats


def shared_coverage(users, sets, rows, spreads, *, repeats, mean=0.65, seed=0):
    """The shares of the intervals of the mean over users, and of the share of users served, that hold the true value,
    where each user judges some of the same sets of responses.

    ``rows`` is the number of sets that each user judges, or the least and the most. Effects as of `crossed_coverage`.
    """
    rng = np.random.default_rng([seed, users, sets, int(1000 * mean), int(10 * sum(spreads))])
    least, most = rows if isinstance(rows, tuple) else (rows, rows)
    centre = np.sqrt(1 + spreads[0] ** 2 + spreads[1] ** 2) * ndtri(mean)
    # the share served, if sets are drawn for each user: over the users' effects and numbers of rows
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    rate = ndtr((centre + spreads[0] * nodes) / np.sqrt(1 + spreads[1] ** 2))
    counts = np.arange(max(least, 5), most + 1)  # with fewer rows nobody can be served
    needed = [int(np.argmax(win_tails(((0.5, n),)) <= 0.05)) for n in counts]
    served = np.mean([weights @ binom.sf(k - 1, n, rate) for n, k in zip(counts, needed)]) / weights.sum()
    hits = np.zeros(2)
    for _ in range(repeats):
        judged = [rng.permutation(sets)[:n] for n in rng.integers(least, most + 1, users)]
        user, item = np.repeat(np.arange(users), list(map(len, judged))), np.concatenate(judged)
        effects = [spread * rng.standard_normal(n) for spread, n in zip(spreads, (users, sets))]
        won = rng.standard_normal(len(user)) + effects[0][user] + effects[1][item] + centre > 0
        clusters = Clusters(tuple(map(str, user)), tuple((str(one),) for one in item))
        of_users = accuracy_interval(won, clusters, per_user=True).bounds
        tested = share_served(clusters.users, won, [0.5] * len(user), responses=clusters.responses)
        for place, (bounds, true) in enumerate([(of_users, mean), (tested["coverage_ci95"], served)]):
            low, high = bounds or (0, 0)
            hits[place] += low <= true <= high
    return hits / repeats


SHARED = (  # users, sets of responses, sets that each user judges
    (30, 20, 20),
    (30, 20, (5, 20)),
    (60, 40, 20),
)
CROSSED = (  # users, sets of responses, rows
    (30, 20, 150),
    (30, 20, 600),
    (12, 40, 200),
    (60, 60, 600),
)
SKEWS = (0.0, 1.0, 1.5)
EFFECTS = ((0.0, 0.0), (0.5, 0.5), (0.5, 0.0), (0.0, 0.5))


def crossed_table(repeats):
    """Yield the lines of the table of two-way intervals: the lowest and the highest coverage over all effects."""
    yield "| users, sets, rows | " + " | ".join(f"skew {skew:g}" for skew in SKEWS) + " |"
    yield "|---|" + "---|" * len(SKEWS)
    for design in CROSSED:
        cells = []
        for skew in SKEWS:
            shares = [
                crossed_coverage(*design, skew, spreads, repeats=repeats, better=better)
                for spreads in EFFECTS
                for better in (None, 0.0)
            ]
            cells.append(f"{min(shares):.3f} to {max(shares):.3f}")
        yield f"| {', '.join(map(str, design))} | " + " | ".join(cells) + " |"


def shared_table(repeats):
    """Yield the lines of the table of figures of users who judge the same responses: the lowest and the highest
    coverage over all means and effects."""
    yield "| users, sets, sets that a user judges | mean over users | share of users served |"
    yield "|---|---|---|"
    for design in SHARED:
        shares = [
            shared_coverage(*design, spreads, mean=mean, repeats=repeats)
            for spreads in EFFECTS
            for mean in (0.5, 0.65, 0.8)
        ]
        cells = (f"{min(column):.3f} to {max(column):.3f}" for column in zip(*shares))
        users, sets, rows = design
        rows = " to ".join(map(str, rows)) if isinstance(rows, tuple) else rows
        yield f"| {users}, {sets}, {rows} | " + " | ".join(cells) + " |"


def told_apart(runs, *, unequal, repeats, users=30, rows=50, spread=0.5, seed=0):
    """How often `prb compare` tells some pair of equally good runs apart.

    Each run has its own effect for each user, normal on a probit scale; rows are ``rows`` for each user, or log-normal
    numbers with this mean.
    """
    rng = np.random.default_rng([seed, runs, int(unequal)])
    often = 0
    for _ in range(repeats):
        counts = np.full(users, rows)
        if unequal:
            counts = 1 + (rows * np.exp(rng.standard_normal(users) - 0.5)).astype(int)
        user = np.repeat(np.arange(users), counts)
        scored = {}
        for run in range(runs):
            effect = spread * rng.standard_normal(users)[user]
            won = rng.standard_normal(len(user)) + effect + 0.5 > 0
            scored[f"run {run}"] = [
                ScoredRow(str(place), None, f"u{name}", [float(win), 0.5], [1.0, 0.0])
                for place, (name, win) in enumerate(zip(user, won))
            ]
        often += any(run["rank_group"] > 1 for run in compare_rows(scored)["runs"])
    return often / repeats


def ranks_table(repeats):
    """Yield the lines of the table of how often equally good runs are told apart."""
    yield "| runs | 30 users of 50 rows | 30 users of unequal numbers of rows |"
    yield "|---|---|---|"
    for runs in (2, 5, 10):
        shares = [told_apart(runs, unequal=unequal, repeats=repeats) for unequal in (False, True)]
        yield f"| {runs} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"


def table(repeats):
    """Yield the lines of the table: the lowest and the highest coverage over all means and spreads."""
    yield "| users | " + " | ".join(f"{pairs} pairs" for pairs in PAIRS) + " |"
    yield "|---|" + "---|" * len(PAIRS)
    for users in USERS:
        bounds = []
        for pairs in PAIRS:
            shares = [
                (coverage(users, pairs, mean, spread, repeats=repeats), mean, spread)
                for mean, spread in cells()
            ]
            (low, *at_low), (high, *at_high) = min(shares), max(shares)
            bounds.append(f"{low:.3f} ({at_low[0]}, {at_low[1]}) to {high:.3f} ({at_high[0]}, {at_high[1]})")
        yield f"| {users} | " + " | ".join(bounds) + " |"


def methods_table(repeats):
    """Yield the lines of the table of methods: the lowest coverage, and the highest from 20 users on."""
    yield "| method | lowest coverage (users, pairs, mean, standard deviation) | highest, from 20 users on |"
    yield "|---|---|---|"
    for name, method in METHODS.items():
        shares = {
            (users, pairs, mean, spread): coverage(users, pairs, mean, spread, repeats=repeats, method=method)
            for users, pairs, (mean, spread) in itertools.product(USERS, PAIRS, cells())
        }
        low = min(shares, key=shares.__getitem__)
        high = max((key for key in shares if key[0] >= 20), key=shares.__getitem__)
        yield f"| {name} | {shares[low]:.3f} {low} | {shares[high]:.3f} {high} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--methods", action="store_true", help="the table of methods instead")
    options = parser.parse_args()
    for lines in (methods_table,) if options.methods else (table, crossed_table, shared_table):
        for line in (*lines(options.repeats), ""):
            print(line, flush=True)
    for line in () if options.methods else ranks_table(options.repeats // 5):
        print(line, flush=True)
