"""The covariance of people's tastes, from products across different comparisons of the same person.

With the margin m of a choice, s = sigmoid(-m), c = s (1 - s) and delta = chosen - rejected, two choices i and j of one
person have, for small tastes w ~ N(mu, Sigma),

    E[s_i delta_i (s_j delta_j)^T] = c_i c_j delta_i delta_i^T Sigma delta_j delta_j^T

Products across comparisons therefore estimate Sigma without the noise of a single choice (Haseman and Elston 1972). A
comparison is never multiplied with itself, nor with one that shares a text, because their noise is common. In the
space of features one matrix M = E[c delta delta^T] serves for all. In the space of texts, of which a person judges
only a few, each pair of texts has a separate count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prb_jax.personal.few_shot.choices import Choices

TEXT_SHRINK = 1.0
"""Products of c, added to those of each pair of texts: some twenty people who judged both, so that fewer say less."""

_ROUNDS = 4
"""In which the variance of each text is put in the place of the products with itself, which are noise."""


@dataclass(frozen=True)
class Judgements:
    """Choices, and votes on single texts as choices between the text and a typical one."""

    deltas: np.ndarray  # float32 [n, D], chosen minus rejected
    texts: np.ndarray  # int32 [n, 2], chosen and rejected; ``typical`` in the place of the typical text
    person: np.ndarray  # int [n]
    typical: int  # number of the typical text: the last text's number plus one


def judgements_of(choices: Choices, *, votes: bool) -> Judgements:
    """Return the choices of people and, with ``votes``, the votes in their profiles on texts that are responses too.

    A vote has the features of the response, minus the mean of all votes.
    """
    items = np.arange(len(choices.features)) if choices.items is None else np.asarray(choices.items)
    typical, person = int(items.max()) + 1, choices.users.astype(np.int64)
    deltas, texts = choices.deltas, choices.texts.astype(np.int32)
    users, voted, signs = choices.profile_votes()
    if votes and (judged := voted < typical).any():
        users, voted, signs = users[judged], voted[judged], signs[judged]
        row_of = np.full(typical, -1)
        row_of[items] = np.arange(len(items))
        features = np.asarray(choices.features, np.float32)[row_of[voted]]
        deltas = np.concatenate([deltas, signs[:, None] * (features - features.mean(axis=0))])
        pairs = np.stack([voted, np.full(len(voted), typical)], axis=1)
        pairs = np.where(signs[:, None] > 0, pairs, pairs[:, ::-1])
        texts, person = np.concatenate([texts, pairs.astype(np.int32)]), np.concatenate([person, users])
    return Judgements(deltas.astype(np.float32), texts, person, typical)


def taste_covariance(
    choices: Choices, margins: np.ndarray, *, components: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimate the covariance of people's tastes for features.

    Args:
      choices: The n choices of several people.
      margins: Margins under the tastes of everybody, float [n].
      components: Maximum number of components of the differences.

    Returns:
      W float [D, C], variances float [C] (falling, noise may make some of them negative) and Q float [C, C] with
      orthonormal columns: the covariance is W Q diag(variances) Q^T W^T.
    """
    deltas = np.asarray(choices.deltas, np.float64)
    residuals = 1 / (1 + np.exp(np.asarray(margins, np.float64)))
    curvature = residuals * (1 - residuals)
    sizes, vectors = np.linalg.eigh((deltas * curvature[:, None]).T @ deltas / len(deltas))
    chosen = np.argsort(-sizes)[:components]
    chosen = chosen[sizes[chosen] > 1e-6 * sizes.max()]
    whiten = vectors[:, chosen] / np.sqrt(sizes[chosen])
    slopes = (deltas @ whiten) * residuals[:, None]

    def products(groups: np.ndarray) -> tuple[np.ndarray, float]:
        """The sum of products of different rows of a group, and how many there are."""
        order, counts = np.unique(groups, return_inverse=True, return_counts=True)[1:]
        sums = np.zeros((len(counts), slopes.shape[1]))
        np.add.at(sums, order.reshape(-1), slopes)
        return sums.T @ sums - slopes.T @ slopes, float((counts.astype(np.float64) ** 2).sum() - len(slopes))

    person = choices.person.astype(np.int64)
    all_within, total_within = products(person)
    first, second = _sharing(person, choices.texts)
    shared = slopes[first].T @ slopes[second]
    within, number = all_within - shared - shared.T, total_within - 2.0 * len(first)
    everything, total = products(np.zeros(len(deltas), np.int64))
    between, others = everything - all_within, total - total_within
    estimate = within / max(number, 1.0) - between / max(others, 1.0)
    variances, axes = np.linalg.eigh((estimate + estimate.T) / 2)
    return whiten, variances[::-1].copy(), axes[:, ::-1]


def text_tastes(judged: Judgements, margins: np.ndarray, *, rank: int) -> np.ndarray:
    """Estimate the directions in which people differ over single texts, independent of the features of the texts.

    The covariance of two texts is a ratio of sums over the people who judged both in different comparisons: the
    products, divided by the products of c. It is shrunk if few people did. The directions are its largest.

    Args:
      judged: n judgements of several people.
      margins: float [n], under the tastes of everybody.
      rank: T, how many directions.

    Returns:
      float32 [I, T], falling in size: the covariance of the texts is Q Q^T. Directions that are noise are 0.
    """
    from scipy.sparse import csr_array  # scipy takes long to import
    from scipy.sparse.linalg import eigsh

    slopes = 1 / (1 + np.exp(np.asarray(margins, np.float64)))
    sides = np.stack([slopes, -slopes], axis=1)
    sides[judged.texts == judged.typical] = 0
    curved = np.where(sides == 0, 0, (slopes * (1 - slopes))[:, None])
    persons = np.unique(judged.person, return_inverse=True)[1].reshape(-1)
    size = judged.typical
    texts = np.where(sides == 0, 0, judged.texts)

    def of_groups(values: np.ndarray, groups: np.ndarray) -> csr_array:
        """The sums of the values of texts over groups of judgements."""
        where = (np.repeat(groups, 2), texts.reshape(-1))
        return csr_array((values.reshape(-1), where), shape=(int(groups.max()) + 1, size))

    def across(values: np.ndarray) -> csr_array:
        """The sums, for each two texts, of products across different judgements of the same person."""
        every = np.arange(len(values))
        rows, people = of_groups(values, every), of_groups(values, persons)
        products = people.T @ people - rows.T @ rows
        shared = rows[first].T @ rows[second]
        return csr_array(products - shared - shared.T)

    alike = np.where(judged.texts == judged.typical, -1, judged.texts)
    first, second = _sharing(persons, alike)
    told, weights = across(sides), across(curved)
    weights.data = 1 / (np.maximum(weights.data, 0) + TEXT_SHRINK)
    estimate = csr_array(told.multiply(weights))
    estimate = (estimate + estimate.T) / 2
    estimate.setdiag(0)
    rank, start = min(rank, size - 2), np.ones(size)
    loadings = np.zeros((size, max(rank, 0)))
    for _ in range(_ROUNDS if rank > 0 and estimate.nnz else 0):
        estimate.setdiag(np.sum(loadings**2, axis=1))
        sizes, vectors = eigsh(estimate, k=rank, which="LA", v0=start, tol=1e-6)  # pyright: ignore[reportArgumentType] - the stubs say int
        order = np.argsort(-sizes)
        loadings = vectors[:, order] * np.sqrt(np.maximum(sizes[order], 0))
    return loadings.astype(np.float32)


def _sharing(person: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of different choices of a person that have a text in common, two arrays of places; a text below 0 is
    none."""
    texts = np.asarray(texts, np.int64)
    keys = (person[:, None].astype(np.int64) * (int(texts.max(initial=0)) + 1) + texts).reshape(-1)
    rows = np.repeat(np.arange(len(person)), 2)
    kept = texts.reshape(-1) >= 0
    keys, rows = keys[kept], rows[kept]
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    together = {
        (first, second)
        for rows_of_text in np.split(rows[order], edges)
        if len(rows_of_text) > 1
        for first in rows_of_text.tolist()
        for second in rows_of_text.tolist()
        if first < second
    }
    if not together:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    first, second = np.asarray(sorted(together)).T
    return first, second
