"""Empirical Bayes: a prior of tastes estimated from the seen people, and each person's posterior in closed form.

    w_u ~ N(mu + L A z_u, L L^T + r I),   P(i is chosen over j) = sigmoid(w_u.(e_i - e_j) + b_i - b_j)

mu and b, the effects of texts that several people judged, are pooled Bradley-Terry; z_u is the mean of the posts of a
profile. With the margin m of a choice under mu and b, s = sigmoid(-m), c = s (1 - s) and delta = chosen - rejected, two
choices i and j of one person have, for small Sigma,

    E[s_i delta_i (s_j delta_j)^T] = M Sigma M,   M = E[c delta delta^T],

so Sigma is estimated from products across different comparisons of the same person (never of a comparison with itself,
nor of two that share a text, whose noise is common), less the same products between persons (Haseman and Elston 1972).
Its eigenvectors in the metric of M are the directions of taste; how many are kept, what all others are left with (low
rank and diagonal) and the scale are chosen on the validation part, with "nothing personal" among the choices. mu and b
are then fitted again, for pooled margins are those of the mean of many tastes, smaller than those of the mean taste.
r, tastes in all directions alike, stands for what the low rank leaves out, and is chosen there too. A is ridge
regression of the seen people's posterior means. Adaptation is the Laplace posterior (one Newton solve in the
k-dimensional dual), and a margin is shrunk by the posterior's variance v, m / sqrt(1 + pi v / 8) (MacKay 1992), so that
its sigmoid is a probability. Of the part r I the mean is that of the posterior, and the variance that of the prior: k
choices hardly change it, and a state stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Posts, Responses, group
from prb_jax.personal.few_shot.fitting import (
    Pairs,
    Validation,
    laplace_posterior,
    mean_loss,
    minimise,
    pairs_of,
    pooled_direction,
)
from prb_jax.personal.few_shot.offset import precision_of
from prb_jax.personal.few_shot.protocol import Fitted, Method, State, adapt_users
from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers


@dataclass(frozen=True, kw_only=True)
class BayesSettings(FewShotSettings):
    """Settings of empirical Bayes; of each tuple the validation part chooses one entry.

    Attributes:
      l2: penalties of the pooled direction.
      item_precision: precisions of the effects of texts; no effects are tried too.
      rank: how many directions of taste keep their own variance.
      scale: factors of the estimated covariance; nothing personal is tried too.
      spread: standard deviations of the part of a margin that comes from tastes in all directions alike; no such part
        is tried too.
      profile_l2: penalties of the regression on profiles, in people; no regression is tried too.
      directions: J, how many directions of taste are kept at most: a posterior holds J + J^2 numbers.
      components: principal components of the differences in which the covariance is estimated, at most.
      steps: updates of the solver at most.
    """

    l2: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    item_precision: tuple[float, ...] = (1.0, 10.0)
    rank: tuple[int, ...] = (1, 2, 4, 8)
    scale: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    spread: tuple[float, ...] = (0.3, 0.6, 1.0)
    profile_l2: tuple[float, ...] = (10.0, 100.0, 1000.0)
    directions: int = 16
    components: int = 64
    steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(
            self,
            above={"l2": 0, "item_precision": 0, "scale": 0, "spread": 0, "profile_l2": 0},
            least={"rank": 1, "directions": 1, "components": 1, "steps": 1},
        )


def fit(
    seen: Choices, validation: Choices, *, settings: BayesSettings, key: jax.Array, mesh: Mesh | None = None
) -> Fitted:
    """Estimate the prior of people's tastes from the seen people."""
    seen.require("bayes", ())
    direction, l2 = pooled_direction(seen, validation, l2=settings.l2, steps=settings.steps)
    judge = Validation(validation, settings.validation_shots)
    basis = np.zeros((len(direction), settings.directions), np.float32)
    arrays = {"direction": direction, "items": np.zeros(1, np.float32), "basis": basis}
    if seen.posts is not None:
        arrays |= {"post_mean": np.zeros_like(direction), "profile": np.zeros_like(basis)}
    names = ("item_precision", "rank", "scale", "rest", "spread", "isotropic", "profile_l2")
    numbers = {name: np.float32(0) for name in names}
    plain = [Fitted(arrays, numbers | {"l2": np.float32(l2)}, settings)]
    nobody = judge.best(METHOD, plain + list(_with_items(seen, plain[0])), key=key, mesh=mesh)
    best = judge.best(METHOD, [nobody, *_with_tastes(seen, nobody)], key=key, mesh=mesh)
    spread = [
        one for base in {id(one): one for one in (nobody, best)}.values() for one in _with_rest(seen, base)
    ]
    best = judge.best(METHOD, [best, *spread], key=key, mesh=mesh)
    if seen.posts is None or not best.numbers["scale"]:
        return best
    return judge.best(METHOD, [best, *_with_profiles(seen, best, key, mesh)], key=key, mesh=mesh)


def _with_items(seen: Choices, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with effects of texts, where several people judged the same ones."""
    if seen.items is None:
        return
    texts = _texts(seen)
    judged = np.unique(np.stack([np.repeat(seen.person, 2), texts.reshape(-1)], axis=1), axis=0)
    if len(judged) < 2 * len(np.unique(texts)):  # two judges a text in the mean
        return
    arrays = fitted.arrays | {"items": np.zeros(int(np.max(seen.items)) + 1, np.float32)}
    for precision in fitted.settings.item_precision:
        numbers = fitted.numbers | {"item_precision": np.float32(precision)}
        yield _with_mean(seen, pairs_of(seen), Fitted(arrays, numbers, fitted.settings))


def _texts(choices: Choices) -> np.ndarray:
    """int [n, 2]: the texts that were chosen and rejected."""
    items = np.asarray(choices.items)
    return np.stack([items[choices.chosen], items[choices.rejected]], axis=1)


def _with_mean(seen: Choices, pairs: Pairs, fitted: Fitted) -> Fitted:
    """The same tastes with the mean taste and the effects of texts fitted again, from those that are there."""
    numbers, basis = fitted.numbers, fitted.arrays["basis"]
    variance = np.sum((pairs.deltas @ basis) ** 2, axis=1)
    variance += numbers["isotropic"] * np.sum(pairs.deltas**2, axis=1)
    direction, effects = _fit_mean(
        pairs,
        _texts(seen) if numbers["item_precision"] else None,
        1 / np.sqrt(1 + np.pi / 8 * variance),
        numbers["l2"],
        numbers["item_precision"],
        (fitted.arrays["direction"], fitted.arrays["items"]),
        steps=fitted.settings.steps,
    )
    arrays = {"direction": np.asarray(direction), "items": np.asarray(effects)}
    return Fitted(fitted.arrays | arrays, numbers, fitted.settings)


def _with_rest(seen: Choices, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with tastes in all directions alike."""
    pairs = pairs_of(seen)
    for spread in fitted.settings.spread:
        numbers = {"spread": np.float32(spread), "isotropic": np.float32(1 / precision_of(seen, spread))}
        yield _with_mean(seen, pairs, Fitted(fitted.arrays, fitted.numbers | numbers, fitted.settings))


@partial(jax.jit, static_argnames="steps")
def _fit_mean(
    pairs: Pairs,
    texts: Array | None,
    shrink: Array,
    l2: Array,
    precision: Array,
    start: tuple[Array, Array],
    *,
    steps: int,
) -> tuple[Array, Array]:
    """The mean taste and the effects of texts, where margins are shrunk by the spread of tastes."""

    def loss(params: tuple[Array, Array]) -> jax.Array:
        v, b = params
        margins = pairs.deltas @ v
        if texts is not None:
            margins = margins + b[texts[:, 0]] - b[texts[:, 1]]
        penalty = 0.5 * l2 * jnp.sum(v * v) + 0.5 * precision * jnp.sum(b * b) / jnp.sum(pairs.weights)
        return mean_loss(shrink * margins, pairs.weights) + penalty

    return minimise(loss, start, steps=steps)


def _with_tastes(seen: Choices, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with the covariance of tastes, for each rank and scale."""
    settings = fitted.settings
    to_features, variances, axes = taste_covariance(
        seen, np.asarray(pooled_margins(fitted, seen)), components=settings.components
    )
    kept = min(settings.directions, len(variances))
    pairs = pairs_of(seen)
    for rank, scale in product(sorted({min(rank, kept) for rank in settings.rank}), settings.scale):
        rest = max(0.0, float(variances[rank:].mean())) if rank < len(variances) else 0.0
        spread = np.maximum(variances[:kept], rest)
        spread[rank:] = rest
        if not spread.any():
            continue
        basis = np.zeros_like(fitted.arrays["basis"])
        basis[:, :kept] = to_features @ axes[:, :kept] * np.sqrt(scale * spread)
        chosen = {"rank": np.float32(rank), "scale": np.float32(scale), "rest": np.float32(rest)}
        with_basis = Fitted(fitted.arrays | {"basis": basis}, fitted.numbers | chosen, settings)
        yield _with_mean(seen, pairs, with_basis)


def pooled_margins(fitted: Fitted, choices: Choices) -> Array:
    """Return the margins of choices when nothing is known of anybody, float32 [n]."""
    margins = choices.deltas @ fitted.arrays["direction"]
    if choices.items is None:
        return margins
    effects = _effects(fitted, np.asarray(choices.items))
    return margins + effects[choices.chosen] - effects[choices.rejected]


def taste_covariance(
    choices: Choices, margins: np.ndarray, *, components: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimate the covariance of people's tastes from products across different comparisons.

    Args:
      choices: n choices of several people.
      margins: float [n], under the tastes of everybody.
      components: of the differences, at most.

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
    names = np.arange(len(choices.features)) if choices.items is None else np.asarray(choices.items)
    texts = np.stack([names[choices.chosen], names[choices.rejected]]).astype(np.int64)
    shared, count = _sharing(person, texts, slopes)
    within, number = all_within - shared, total_within - count
    everything, total = products(np.zeros(len(deltas), np.int64))
    between, others = everything - all_within, total - total_within
    estimate = within / max(number, 1.0) - between / max(others, 1.0)
    variances, axes = np.linalg.eigh((estimate + estimate.T) / 2)
    return whiten, variances[::-1].copy(), axes[:, ::-1]


def _sharing(person: np.ndarray, texts: np.ndarray, slopes: np.ndarray) -> tuple[np.ndarray, float]:
    """The sum of products of different choices of a person that have a text in common, and how many there are."""
    keys = np.concatenate([person, person]) * (int(texts.max()) + 1) + texts.reshape(-1)
    rows = np.tile(np.arange(len(person)), 2)
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
        return np.zeros((slopes.shape[1],) * 2), 0.0
    first, second = np.asarray(sorted(together)).T
    found = slopes[first].T @ slopes[second]
    return found + found.T, 2.0 * len(first)


def _with_profiles(seen: Choices, fitted: Fitted, key: jax.Array, mesh: Mesh | None) -> Iterator[Fitted]:
    """Fits in which the profile tells the mean of the prior: ridge regression of the posterior means."""
    posts = seen.posts
    assert posts is not None
    contexts = group(seen)
    means = adapt_users(METHOD, fitted, seen, contexts, key=key, mesh=mesh)["weights"]
    told = np.asarray(_profile(jax.tree.map(lambda leaf: np.asarray(leaf)[contexts.users], posts)))
    center = told.mean(axis=0)
    centred = told - center
    size = np.mean(np.sum(centred**2, axis=1)) + 1e-12
    for l2 in fitted.settings.profile_l2:
        # In the space of the people, who are fewer than the features or not many more.
        kernel = centred @ centred.T + l2 * size * np.eye(len(centred))
        weights = centred.T @ np.linalg.solve(kernel, means - means.mean(axis=0))
        arrays = {"post_mean": center.astype(np.float32), "profile": weights.astype(np.float32)}
        yield Fitted(fitted.arrays | arrays, fitted.numbers | {"profile_l2": np.float32(l2)}, fitted.settings)


def _profile(posts: Posts) -> Array:
    """The mean of the posts [..., M, D], those that the person disagrees with turned round, [..., D]."""
    weights = jnp.asarray(posts.mask, jnp.float32)
    signs = weights if posts.signs is None else weights * jnp.where(jnp.asarray(posts.signs) < 0, -1.0, 1.0)
    total = jnp.sum(signs[..., None] * posts.features, axis=-2)
    return total / jnp.maximum(jnp.sum(weights, axis=-1), 1.0)[..., None]


def _effects(fitted: Fitted, items: Array) -> Array:
    """The effects of texts; 0 of one that no seen person judged."""
    effects = fitted.arrays["items"]
    known = (items >= 0) & (items < len(effects))
    return jnp.where(known, jnp.asarray(effects)[jnp.where(known, items, 0)], 0.0)


def empty_state(fitted: Fitted) -> State:
    """Return the prior of a person without a profile."""
    width, count = fitted.arrays["basis"].shape
    return {
        "weights": jnp.zeros(count, jnp.float32),
        "covariance": jnp.eye(count, dtype=jnp.float32),
        "rest": jnp.zeros(width, jnp.float32),
    }


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the posterior of a person: its mode [J] and covariance [J, J] in the directions of taste, and the mode of
    the rest [D]."""
    deltas, rest = context.deltas, fitted.numbers["isotropic"]
    rows = deltas @ fitted.arrays["basis"]
    prior = jnp.zeros(rows.shape[1], jnp.float32)
    if context.posts is not None and "profile" in fitted.arrays:
        has_posts = jnp.any(context.posts.mask)
        told = (_profile(context.posts) - fitted.arrays["post_mean"]) @ fitted.arrays["profile"]
        prior = jnp.where(has_posts, told, prior)
    margins = deltas @ fitted.arrays["direction"]
    if context.chosen.items is not None and context.rejected.items is not None:
        effects = _effects(fitted, context.chosen.items) - _effects(fitted, context.rejected.items)
        margins = margins + effects * context.mask
    kernel = rows @ rows.T + rest * (deltas @ deltas.T)
    dual, factor, root = laplace_posterior(kernel, context.mask, margins + rows @ prior)
    known = jax.scipy.linalg.solve_triangular(factor, root[:, None] * rows, lower=True)
    return {
        "weights": prior + dual @ rows,
        "covariance": jnp.eye(len(prior)) - known.T @ known,
        "rest": rest * (dual @ deltas),
    }


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return the mean rewards, float32 [K], shrunk by the variance of their differences: of two responses the sigmoid
    of the difference is the probability of the choice."""
    features = responses.features
    tastes = features @ fitted.arrays["basis"]
    means = features @ (fitted.arrays["direction"] + state["rest"]) + tastes @ state["weights"]
    if responses.items is not None:
        means = means + _effects(fitted, responses.items)
    count = len(means)
    apart, others = tastes - tastes.mean(axis=0), features - features.mean(axis=0)
    # The mean over all pairs of responses of the variance of their difference.
    spread = jnp.einsum("kj,jl,kl->", apart, state["covariance"], apart)
    spread = (spread + fitted.numbers["isotropic"] * jnp.sum(others * others)) * 2 / max(count - 1, 1)
    return means / jnp.sqrt(1 + jnp.pi / 8 * spread)


METHOD = Method("bayes", BayesSettings, fit, adapt, score, empty_state, pointwise=False)
