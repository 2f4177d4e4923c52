"""Gates on the surface of answers: length, layout and wrappers must not reveal the chosen answer.

Two classifiers are fitted to the pairs of other people. One uses differences, and finds features that the chosen
answer has more of. The other uses histograms, and finds ranges of chosen answers, e.g. 60 to 70 words. Both are
linear in the signs of the pairs (which side is the chosen one). Verdicts under other signs are therefore cheap: random
signs give the width of the interval, and the signs of a planted leak give the smallest leak that is found.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from prb_jax.building.gates.gate import GateFigure, Pair, chance_figure
from prb_jax.building.settings import GateSettings
from prb_jax.metrics.texts import SURFACE, WRAPPERS, count_words, surface_features
from prb_jax.scoring.clusters import clusters_of

_FOLDS: Final = 5
_PENALTY: Final = 5.0  # ridge penalty, added to the squared standardised differences

_BINS: Final = {"words": 8}  # bins of a histogram, with equal numbers of answers

_OTHER_BINS: Final = 4
_NOTHING: Final = 1e-9  # largest rounding error in the verdict on a pair without information

_CHANCES: Final = 1000
_BUILDS: Final = 200
_POWER: Final = 0.8
_NUMBERS: Final = 2_000_000  # numbers in memory at a time


def measure_length(pairs: Sequence[Pair], *, gates: GateSettings) -> GateFigure:
    """Return the share of pairs whose chosen answer is longer; it must be 0.5 within its interval over users."""
    words = np.array([[count_words(pair.chosen), count_words(pair.rejected)] for pair in pairs])
    values = (np.sign(words[:, 0] - words[:, 1]) + 1) / 2
    chosen, rejected = words.mean(0)
    note = f"{chosen:.1f} words chosen, {rejected:.1f} rejected"
    planted = "the longer answer is the chosen one more often, or the shorter one"
    return chance_figure(values.tolist(), pairs, gates=gates, either_way=True, note=note, planted=planted)


def measure_style(pairs: Sequence[Pair], *, gates: GateSettings) -> GateFigure:
    """Return the accuracy of a classifier of surface differences; it must not exceed 0.5 beyond its interval."""
    planted = "the longer answer is the chosen one more often"
    chosen, rejected = (surface_features([pair.comparison.responses[k] for pair in pairs]) for k in (0, 1))
    deltas = chosen - rejected
    scale = np.sqrt((deltas**2).mean(0))
    names = [f"have more of {name!r}" for name in SURFACE], [f"have less of {name!r}" for name in SURFACE]
    side = np.sign(chosen[:, 0] - rejected[:, 0])
    return _measure(pairs, deltas / np.where(scale > 0, scale, 1.0), names, side, gates, planted)


def measure_histogram(pairs: Sequence[Pair], *, gates: GateSettings) -> GateFigure:
    """Return the accuracy of a classifier of each answer's histogram bins; for the limit see `measure_style`."""
    planted = "the answer whose length is nearer to the middle one of all is the chosen one more often"
    chosen, rejected = (surface_features([pair.comparison.responses[k] for pair in pairs]) for k in (0, 1))
    columns, labels = [np.zeros((len(pairs), 0))], list[str]()
    for column, name in enumerate(SURFACE):
        both = np.concatenate([chosen[:, column], rejected[:, column]])
        bins = _BINS.get(name, _OTHER_BINS)
        edges = np.unique(np.quantile(both, np.arange(1, bins) / bins))
        edges = edges[edges > both.min()]
        if not len(edges):
            continue
        _, places = np.unique(np.searchsorted(edges, both, side="right"), return_inverse=True)
        one_hot = np.eye(places.max() + 1)[places]
        columns.append(one_hot[: len(pairs)] - one_hot[len(pairs) :])
        counts = both if name in WRAPPERS else np.expm1(both)
        for place in range(places.max() + 1):
            of_place = counts[places == place]
            low, high = (f"{end:.1f}".removesuffix(".0") for end in (of_place.min(), of_place.max()))
            labels.append(f"{low if low == high else f'{low} to {high}'} of {name!r}")
    middle = np.median(np.concatenate([chosen[:, 0], rejected[:, 0]]))
    side = np.sign(np.abs(rejected[:, 0] - middle) - np.abs(chosen[:, 0] - middle))
    names = [f"more often have {label}" for label in labels], [f"rarely have {label}" for label in labels]
    return _measure(pairs, np.concatenate(columns, axis=1), names, side, gates, planted)


def _measure(
    pairs: Sequence[Pair],
    columns: np.ndarray,
    names: tuple[Sequence[str], Sequence[str]],
    side: np.ndarray,
    gates: GateSettings,
    planted: str,
) -> GateFigure:
    """Return the figure of a classifier of columns [n, P]; names describe a weight above 0, and below 0.

    ``side`` [n] is 1 if a planted leak favours the chosen answer, -1 if it favours the rejected one, else 0.
    """
    from scipy.special import stdtrit  # slow to import

    users = clusters_of([pair.comparison for pair in pairs]).users
    users = [f"pair {pair.id}" if user is None else user for user, pair in zip(users, pairs, strict=True)]
    # an order independent of the users' names; equal parts of it are the folds
    in_folds = sorted(set(users), key=lambda name: hashlib.sha256(name.encode()).digest())
    numbers = {name: number for number, name in enumerate(in_folds)}
    of_user = np.array([numbers[name] for name in users])
    order = np.argsort(of_user, kind="stable")
    pairs, columns, side = [pairs[place] for place in order], columns[order], side[order]
    classifier = _Classifier(columns, of_user[order])
    values = classifier.verdicts(np.ones((len(pairs), 1)))[:, 0]
    weights = _solve(columns.T @ columns) @ columns.sum(0)
    strength = np.abs(weights) * np.abs(columns).mean(0)
    strongest = int(np.argmax(strength)) if strength.size else 0
    tells = names[int(weights[strongest] < 0)][strongest] if weights.any() else ""
    note = f"strongest: chosen answers {tells}" if tells else ""
    usual = float(stdtrit(max(classifier.effective - 1, 1.0), (1 + gates.level) / 2))
    by_chance = np.concatenate([(means - 0.5) / errors for means, errors in classifier.by_chance()])
    wider = max(float(np.quantile(by_chance, (1 + gates.level) / 2)) / usual, 1.0)
    return chance_figure(
        values.tolist(),
        pairs,
        gates=gates,
        either_way=False,
        note=note,
        planted=planted,
        wider=wider,
        detectable=classifier.smallest_leak(side, values, least=usual * wider),
    )


class _Classifier:
    """Ridge classifier of pairs, fitted to the pairs of other people, for any signs of the pairs: 1 if the chosen
    answer of a pair counts as chosen, -1 if the rejected one does."""

    def __init__(self, columns: np.ndarray, of_user: np.ndarray) -> None:
        """Take columns [n, P] and users [n], numbered and sorted such that each fold is contiguous."""
        self.of_user, self.rows = of_user, np.bincount(of_user)
        shares = self.rows / self.rows.sum()
        squares = float((shares**2).sum())
        self.effective = 1 / squares  # users (Kish 1965)
        # makes the squared sums of residuals by user unbiased; G / (G - 1) for users with as many pairs each
        self._factor = 1 / max(1 - 2 * float((shares**3).sum()) / squares + squares, 1e-12)
        self._starts = np.concatenate([[0], np.cumsum(self.rows)])
        ends = self._starts[np.round(np.linspace(0, len(self.rows), _FOLDS + 1)).astype(int)]
        self._folds = [slice(start, end) for start, end in itertools.pairwise(ends) if start < end]
        gram = columns.T @ columns
        self._columns = [columns[fold] for fold in self._folds]
        self._solved = [inside @ _solve(gram - inside.T @ inside) for inside in self._columns]

    def verdicts(self, signs: np.ndarray) -> np.ndarray:
        """Return 1 if the chosen answer is found, 0 if the other one is, 0.5 for neither; signs and verdicts [n, S]."""
        values = np.full(signs.shape, 0.5)
        parts = [inside.T @ signs[fold] for inside, fold in zip(self._columns, self._folds, strict=True)]
        whole = np.sum(parts, axis=0)
        for fold, part, solved in zip(self._folds, parts, self._solved, strict=True):
            predicted = (solved @ (whole - part)) * signs[fold]
            values[fold] = 0.5 + 0.5 * ((predicted > _NOTHING).astype(float) - (predicted < -_NOTHING))
        return values

    def means_and_errors(self, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean verdict and its standard error over users, as in `chance_figure`, [S] each."""
        values = self.verdicts(signs)
        means, n = values.mean(0), len(values)
        sums = np.add.reduceat(values, self._starts[:-1]) - means * self.rows[:, None]
        return means, np.sqrt((sums**2).sum(0) / n**2 * self._factor + 0.5 / n**2)

    def by_chance(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield means and errors without any leak: each draw gives one random sign to all pairs of a user.

        Verdicts depend on each other beyond users, because each fold is fitted to the others' pairs.
        """
        draws = np.random.default_rng(0)
        for count in _blocks(_CHANCES, len(self.of_user)):
            yield self.means_and_errors(draws.choice([-1.0, 1.0], (len(self.rows), count))[self.of_user])

    def smallest_leak(self, side: np.ndarray, values: np.ndarray, *, least: float) -> float | None:
        """Return the smallest leak that is found in 80 % of builds; None if no leak would be found. It is found if it
        is ``least`` standard errors above 0.5. For ``side`` see `_measure`; leaks depend within users as the verdicts
        ``values`` [n] do."""
        from scipy.special import ndtri  # slow to import

        n, decided = len(side), float(np.mean(side != 0))
        spread, pairs_in_user = float(np.var(values)), float((self.rows.astype(float) ** 2).sum() / n)
        sums = np.bincount(self.of_user, weights=values - values.mean())
        effect = float((sums**2).sum()) * self._factor / n / spread if spread else 1.0
        shared = float(np.clip((effect - 1) / (pairs_in_user - 1), 0, 0.9)) if pairs_in_user > 1 else 0.0
        latent = float(np.sin(np.pi * shared / 2))  # correlation of normals whose signs correlate by `shared`

        def share_found(leak: float) -> float:
            draws, times = np.random.default_rng(1), 0
            for count in _blocks(_BUILDS, n):
                normal = np.sqrt(latent) * draws.standard_normal((len(self.rows), count))[self.of_user]
                normal += np.sqrt(1 - latent) * draws.standard_normal((n, count))
                has = np.where(normal < ndtri(min(0.5 + leak, 1 - 1e-12)), 1.0, -1.0)
                means, errors = self.means_and_errors(has * np.where(side == 0, 1.0, side)[:, None])
                times += int((means - least * errors > 0.5).sum())
            return times / _BUILDS

        low, high = 0.0, 0.5
        if share_found(high) < _POWER:
            return None
        for _ in range(7):
            middle = (low + high) / 2
            low, high = (low, middle) if share_found(middle) >= _POWER else (middle, high)
        return high * decided


def _blocks(total: int, rows: int) -> Iterator[int]:
    """Split a number of draws into blocks; a block of draws with ``rows`` numbers each fits in memory."""
    size = max(_NUMBERS // rows, 1)
    for start in range(0, total, size):
        yield min(size, total - start)


def _solve(gram: np.ndarray) -> np.ndarray:
    # regularised inverse of the products of columns [P, P]
    return np.linalg.inv(gram + _PENALTY * np.eye(len(gram)))
