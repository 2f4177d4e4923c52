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
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.data.options import option
from prb_jax.personal.few_shot.choices import Array, Choices, Context, Posts, Responses, group
from prb_jax.personal.few_shot.fitting import (
    ChoicePairs,
    FitData,
    define,
    laplace_posterior,
    mean_loss,
    minimise,
    pairs_of,
)
from prb_jax.personal.few_shot.offset import precision_of
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Ints, State, adapt_users


@dataclass(frozen=True, kw_only=True)
class BayesSettings(FewShotSettings):
    """Settings of empirical Bayes; of each tuple the validation part chooses one entry."""

    l2: Floats = option((1e-4, 1e-3, 1e-2, 1e-1, 1.0), "penalties of the pooled direction", above=0)
    item_precision: Floats = option(
        (1.0, 10.0), "precisions of the effects of texts; no effects are tried too", above=0
    )
    rank: Ints = option((1, 2, 4, 8), "how many directions of taste keep their own variance", least=1)
    scale: Floats = option(
        (0.3, 1.0, 3.0, 10.0), "factors of the estimated covariance; nothing personal is tried too", above=0
    )
    spread: Floats = option(
        (0.3, 0.6, 1.0),
        "standard deviations of the part of a margin that comes from tastes in all directions alike; no such part is "
        "tried too",
        above=0,
    )
    profile_l2: Floats = option(
        (10.0, 100.0, 1000.0),
        "penalties of the regression on profiles, in people; no regression is tried too",
        above=0,
    )
    directions: int = option(
        16, "J, how many directions of taste are kept at most: a posterior holds J + J^2 numbers", least=1
    )
    components: int = option(
        64, "principal components of the differences in which the covariance is estimated, at most", least=1
    )
    steps: int = option(100, "updates of the solver at most", least=1)


def fit(data: FitData) -> Fitted:
    """Estimate the prior of people's tastes from the seen people, one part of it after another."""
    seen, settings = data.seen, data.settings
    direction, l2 = data.pooled(steps=settings.steps)
    basis = np.zeros((len(direction), settings.directions), np.float32)
    arrays = {"direction": direction, "items": np.zeros(1, np.float32), "basis": basis}
    if seen.posts is not None:
        arrays |= {"post_mean": np.zeros_like(direction), "profile": np.zeros_like(basis)}
    names = ("item_precision", "rank", "scale", "rest", "spread", "isotropic", "profile_l2")
    plain = data.fitted(arrays, {**dict.fromkeys(names, 0.0), "l2": l2})
    nobody = data.best([plain, *_with_items(seen, plain)])
    tastes = data.best([nobody, *_with_tastes(seen, nobody)])
    bases = [nobody, tastes] if tastes.numbers["scale"] else [nobody]
    alike = [
        _with_mean(seen, _with(base, {"spread": spread, "isotropic": 1 / precision_of(seen, spread)}))
        for base in bases
        for spread in settings.spread  # tastes in all directions alike
    ]
    best = data.best([tastes, *alike])
    if seen.posts is None or not best.numbers["scale"]:
        return best
    return data.best([best, *_with_profiles(data, best)])


def _with(fitted: Fitted, numbers: dict[str, Any], **arrays: Any) -> Fitted:
    changed = {name: np.float32(value) for name, value in numbers.items()}
    return replace(fitted, arrays=fitted.arrays | arrays, numbers=fitted.numbers | changed)


def _with_items(seen: Choices, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with effects of texts, where several people judged the same ones."""
    if seen.items is None:
        return
    judged = np.unique(np.stack([np.repeat(seen.person, 2), seen.texts.reshape(-1)], axis=1), axis=0)
    if len(judged) < 2 * len(np.unique(seen.texts)):  # two judges a text in the mean
        return
    items = np.zeros(int(np.max(seen.items)) + 1, np.float32)
    for precision in fitted.settings.item_precision:
        yield _with_mean(seen, _with(fitted, {"item_precision": precision}, items=items))


def _with_tastes(seen: Choices, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with the covariance of tastes, for each rank and scale."""
    settings, margins = fitted.settings, np.asarray(pooled_margins(fitted, seen))
    to_features, variances, axes = taste_covariance(seen, margins, components=settings.components)
    kept = min(settings.directions, len(variances))
    for rank, scale in product(sorted({min(rank, kept) for rank in settings.rank}), settings.scale):
        rest = max(0.0, float(variances[rank:].mean())) if rank < len(variances) else 0.0
        spread = np.maximum(variances[:kept], rest)
        spread[rank:] = rest
        if not spread.any():
            continue
        basis = np.zeros_like(fitted.arrays["basis"])
        basis[:, :kept] = to_features @ axes[:, :kept] * np.sqrt(scale * spread)
        yield _with_mean(seen, _with(fitted, {"rank": rank, "scale": scale, "rest": rest}, basis=basis))


def _with_mean(seen: Choices, fitted: Fitted) -> Fitted:
    """The same tastes with the mean taste and the effects of texts fitted again, from those that are there."""
    pairs, numbers = pairs_of(seen), fitted.numbers
    variance = np.sum((pairs.deltas @ fitted.arrays["basis"]) ** 2, axis=1)
    variance += numbers["isotropic"] * np.sum(pairs.deltas**2, axis=1)
    direction, effects = _fit_mean(
        pairs,
        seen.texts.astype(np.int32) if numbers["item_precision"] else None,
        1 / np.sqrt(1 + np.pi / 8 * variance),
        numbers["l2"],
        numbers["item_precision"],
        (fitted.arrays["direction"], fitted.arrays["items"]),
        steps=fitted.settings.steps,
    )
    return _with(fitted, {}, direction=np.asarray(direction), items=np.asarray(effects))


@partial(jax.jit, static_argnames="steps")
def _fit_mean(
    pairs: ChoicePairs,
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


def pooled_margins(fitted: Fitted, choices: Choices) -> Array:
    """Return the margins of choices when nothing is known of their users, float32 [n]."""
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
    shared, count = _sharing(person, choices.texts.T, slopes)
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
    products = slopes[first].T @ slopes[second]
    return products + products.T, 2.0 * len(first)


def _with_profiles(data: FitData, fitted: Fitted) -> Iterator[Fitted]:
    """Fits in which the profile tells the mean of the prior: ridge regression of the posterior means."""
    contexts = group(data.seen)
    means = adapt_users(METHOD, fitted, data.seen, contexts, key=data.key, mesh=data.mesh)["weights"]
    posts = jax.tree.map(lambda leaf: np.asarray(leaf)[contexts.users], data.seen.posts)
    profiles = np.asarray(_profile(posts))
    center = profiles.mean(axis=0)
    centred = profiles - center
    size = np.mean(np.sum(centred**2, axis=1)) + 1e-12
    for l2 in fitted.settings.profile_l2:
        # In the space of the people, who are fewer than the features or not many more.
        kernel = centred @ centred.T + l2 * size * np.eye(len(centred))
        weights = centred.T @ np.linalg.solve(kernel, means - means.mean(axis=0))
        arrays = {"post_mean": center.astype(np.float32), "profile": weights.astype(np.float32)}
        yield _with(fitted, {"profile_l2": l2}, **arrays)


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
        mean = (_profile(context.posts) - fitted.arrays["post_mean"]) @ fitted.arrays["profile"]
        prior = jnp.where(has_posts, mean, prior)
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


METHOD = define("bayes", BayesSettings, fit, adapt, score, empty_state, pointwise=False)
