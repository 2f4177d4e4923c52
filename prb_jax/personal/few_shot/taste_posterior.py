"""Posterior of a person's taste under the prior of `bayes`, and the rewards that follow from it.

`bayes` estimates the prior, and its module docstring has the model. A person's choices and posts give the posterior in
closed form: the mode and covariance in the directions of taste, and the mode of the part with equal variance in all
directions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Array, Context, Posts, Responses
from prb_jax.personal.few_shot.factors import half_solved
from prb_jax.personal.few_shot.fitting import laplace_posterior
from prb_jax.personal.few_shot.protocol import Fitted, State
from prb_jax.personal.few_shot.taste_prior import Judgements


def pooled_margins(fitted: Fitted, judged: Judgements) -> np.ndarray:
    """Return the margins of judgements when nothing is known of the people, float32 [n]."""
    known, effects = fitted.arrays["items"][: judged.typical], np.zeros(judged.typical + 1, np.float32)
    effects[: len(known)], effects[-1] = known, fitted.numbers["typical"]
    chosen, rejected = judged.texts.T
    return judged.deltas @ fitted.arrays["direction"] + effects[chosen] - effects[rejected]


def shrinkage(fitted: Fitted, rows: Judgements) -> np.ndarray:
    """Return the factors by which the spread of tastes shrinks the margins of the mean taste, float32 [n]."""
    variance = np.sum((rows.deltas @ fitted.arrays["basis"]) ** 2, axis=1)
    variance += fitted.numbers["isotropic"] * np.sum(rows.deltas**2, axis=1)
    return 1 / np.sqrt(1 + np.pi / 8 * variance)


def mean_post(posts: Posts) -> Array:
    """Return the mean of posts [..., M, D], float32 [..., D]; posts that the person disagrees with are negated."""
    weights = jnp.asarray(posts.mask, jnp.float32)
    signs = weights * jnp.where(jnp.asarray(posts.votes) < 0, -1.0, 1.0)
    total = jnp.sum(signs[..., None] * posts.features, axis=-2)
    return total / jnp.maximum(jnp.sum(weights, axis=-1), 1.0)[..., None]


def _of_items(table: Array, items: Array) -> Array:
    """The rows [., ...] of a table of texts; 0 for a text that no seen person judged."""
    known = (items >= 0) & (items < len(table))
    rows = jnp.asarray(table)[jnp.where(known, items, 0)]
    return jnp.where(known.reshape(known.shape + (1,) * (table.ndim - 1)), rows, 0.0)


def _of_texts(fitted: Fitted, responses: Responses) -> Array:
    """The tastes for single texts, [., T]."""
    texts, shape = fitted.arrays.get("texts"), responses.features.shape[:-1]
    if texts is None or responses.items is None:
        return jnp.zeros((*shape, 0 if texts is None else texts.shape[1]), jnp.float32)
    return _of_items(texts, responses.items)


def empty_state(fitted: Fitted) -> State:
    """Return the prior of a person without a profile."""
    width, count = fitted.arrays["basis"].shape
    if "texts" in fitted.arrays:
        count += fitted.arrays["texts"].shape[1]
    return {
        "weights": jnp.zeros(count, jnp.float32),
        "covariance": jnp.eye(count, dtype=jnp.float32),
        "rest": jnp.zeros(width, jnp.float32),
        "rest_variance": jnp.asarray(fitted.numbers["isotropic"], jnp.float32),
    }


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the posterior of a person: mode [J] and covariance [J, J] in the directions of taste, and of the rest,
    with equal variance in all directions, the mode [D] and the variance [], a mean over the directions in which
    responses differ."""
    deltas, effects, rows, mask = _observations(fitted, context)
    rest = fitted.numbers["isotropic"]
    prior, spread = _prior(fitted, context.posts, rows.shape[1])
    margins = deltas @ fitted.arrays["direction"] + effects + rows @ prior
    rows = rows * spread
    kernel = rows @ rows.T + rest * (deltas @ deltas.T)
    dual, factor, root = laplace_posterior(kernel, mask, margins)
    known = half_solved(factor, root[:, None] * rows)
    left, moment = jnp.float32(1), fitted.arrays.get("moment")
    if moment is not None:
        known_rest = half_solved(factor, root[:, None] * deltas)
        told = jnp.sum((known_rest @ moment) * known_rest) / jnp.trace(moment)
        left = jnp.clip(1 - rest * told, 0, 1)
    return {
        "weights": prior + spread * (dual @ rows),
        "covariance": spread[:, None] * (jnp.eye(len(prior)) - known.T @ known) * spread,
        "rest": rest * (dual @ deltas),
        "rest_variance": rest * left,
    }


def _prior(fitted: Fitted, posts: Posts | None, count: int) -> tuple[Array, Array]:
    """The mean and the standard deviation, [J + T], of a person's tastes given the profile alone."""
    mean, spread, arrays = jnp.zeros(count, jnp.float32), jnp.ones(count, jnp.float32), fitted.arrays
    if posts is None or "profile" not in arrays:
        return mean, spread
    has_posts = jnp.any(posts.mask)
    told = (mean_post(posts) - arrays["post_mean"]) @ arrays["profile"]
    mean = jnp.where(has_posts, mean.at[: len(told)].set(told), mean)
    if (left := arrays.get("left")) is not None:  # of the variance
        spread = jnp.where(has_posts, spread.at[: len(left)].set(jnp.sqrt(left)), spread)
    return mean, spread


def _observations(fitted: Fitted, context: Context) -> tuple[Array, Array, Array, Array]:
    """The choices of a person and the posts of the profile as choices, [k + M]: differences of features [., D], of the
    effects of texts, of tastes [., J + T], and which are there."""
    deltas, mask, effects = context.deltas, context.mask, jnp.zeros(len(context.mask), jnp.float32)
    chosen, rejected, posts = context.chosen, context.rejected, context.posts
    if chosen.items is not None and rejected.items is not None:
        table = fitted.arrays["items"]
        effects = (_of_items(table, chosen.items) - _of_items(table, rejected.items)) * mask
    of_texts = (_of_texts(fitted, chosen) - _of_texts(fitted, rejected)) * mask[:, None]
    if posts is not None and "post_mean" in fitted.arrays:
        voted, numbers = jnp.asarray(posts.votes) != 0, fitted.numbers
        gain = jnp.where(voted, numbers["vote_gain"] * posts.votes, numbers["word_gain"]) * posts.mask
        typical = jnp.where(voted[:, None], fitted.arrays["vote_mean"], fitted.arrays["word_mean"])
        items = jnp.full(gain.shape, -1) if posts.items is None else jnp.asarray(posts.items)
        liked = _of_items(fitted.arrays["items"], items) - numbers["typical"]
        liked = jnp.where(items < 0, 0.0, liked)
        deltas = jnp.concatenate([deltas, gain[:, None] * (posts.features - typical)])
        effects = jnp.concatenate([effects, gain * liked])
        of_posts = _of_texts(fitted, Responses(posts.features, items))
        of_texts = jnp.concatenate([of_texts, gain[:, None] * of_posts])
        mask = jnp.concatenate([mask, posts.mask & (gain != 0)])
    return deltas, effects, jnp.concatenate([deltas @ fitted.arrays["basis"], of_texts], axis=1), mask


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return the mean rewards, float32 [K], shrunk by the variance of their differences: of two responses the sigmoid
    of the difference is the probability of the choice."""
    features = responses.features
    tastes = features @ fitted.arrays["basis"]
    tastes = jnp.concatenate([tastes, _of_texts(fitted, responses)], axis=1)
    means = features @ (fitted.arrays["direction"] + state["rest"]) + tastes @ state["weights"]
    if responses.items is not None:
        means = means + _of_items(fitted.arrays["items"], responses.items)
    count = len(means)
    apart, others = tastes - tastes.mean(axis=0), features - features.mean(axis=0)
    # The mean over all pairs of responses of the variance of their difference.
    spread = jnp.einsum("kj,jl,kl->", apart, state["covariance"], apart)
    rest = state.get("rest_variance", fitted.numbers["isotropic"])  # states of earlier versions have none
    spread = (spread + rest * jnp.sum(others * others)) * 2 / max(count - 1, 1)
    return slope_of(fitted) * means / jnp.sqrt(1 + jnp.pi / 8 * spread)


def slope_of(fitted: Fitted) -> Array:
    """Return the factor of margins that was chosen on the validation part; 1 for a prior of an earlier version."""
    return fitted.numbers.get("slope", jnp.float32(1.0))
