"""Steps of the fit of `bayes`: further priors from one, which do not depend on who chooses among them.

Effects of texts, directions of taste from products and of the highest density, directions of single texts, and the
regression on profiles. After each change of tastes the mean taste and the effects of texts are fitted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Array, group
from prb_jax.personal.few_shot.fitting import (
    ChoicePairs,
    FitData,
    fit_factors,
    mean_loss,
    minimise,
    padded,
    pairs_of,
)
from prb_jax.personal.few_shot.protocol import Fitted, adapt_users
from prb_jax.personal.few_shot.taste_posterior import mean_post, pooled_margins, shrinkage
from prb_jax.personal.few_shot.taste_prior import Judgements, taste_covariance, text_tastes
from prb_jax.personal.few_shot.taste_profile import regression_on_profiles

Judged = Callable[[bool], Judgements]
"""The choices of the seen people, and with True their votes too."""

Step = Callable[[FitData, Judged, Fitted], Iterator[Fitted]]
"""Further fits from one, which do not depend on who chooses among them."""


def changed_fit(fitted: Fitted, numbers: dict[str, Any], **arrays: Any) -> Fitted:
    """Return a fit with some other numbers and arrays."""
    changed = {name: np.float32(value) for name, value in numbers.items()}
    return replace(fitted, arrays=fitted.arrays | arrays, numbers=fitted.numbers | changed)


def with_items(data: FitData, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with effects of texts, where several people judged the same ones."""
    seen = data.seen
    if seen.items is None:
        return
    pairs = np.unique(np.stack([np.repeat(seen.person, 2), seen.texts.reshape(-1)], axis=1), axis=0)
    if len(pairs) < 2 * len(np.unique(seen.texts)):  # two judges a text in the mean
        return
    items = np.zeros(int(np.max(seen.items)) + 1, np.float32)
    counted = len(judged(True).person) > len(seen)
    for precision, votes in product(fitted.settings.item_precision, (0.0, 1.0) if counted else (0.0,)):
        yield with_mean(
            judged, changed_fit(fitted, {"item_precision": precision, "counted": votes}, items=items)
        )


def with_tastes(data: FitData, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with the covariance of tastes, for each rank and scale."""
    settings, margins = fitted.settings, pooled_margins(fitted, judged(False))
    to_features, variances, axes = taste_covariance(data.seen, margins, components=settings.components)
    kept = min(settings.directions, len(variances))
    for rank, scale in product(sorted({min(rank, kept) for rank in settings.rank}), settings.scale):
        rest = max(0.0, float(variances[rank:].mean())) if rank < len(variances) else 0.0
        spread = np.maximum(variances[:kept], rest)
        spread[rank:] = rest
        if not spread.any():
            continue
        basis = np.zeros_like(fitted.arrays["basis"])
        basis[:, :kept] = to_features @ axes[:, :kept] * np.sqrt(scale * spread)
        yield with_mean(
            judged, changed_fit(fitted, {"rank": rank, "scale": scale, "rest": rest}, basis=basis)
        )


def with_fitted_basis(data: FitData, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Yield fits with the directions of highest density, fitted together with the tastes of the seen people."""
    seen, settings, start = data.seen, fitted.settings, fitted.arrays["basis"]
    tastes = adapt_users(
        data.method, fitted, replace(seen, posts=None), group(seen), key=data.key, mesh=data.mesh
    )
    margins = pooled_margins(fitted, judged(False))
    for l2 in settings.basis_l2:
        basis, people = fit_factors(
            seen, margins, np.float32(l2), start, tastes["weights"], steps=settings.steps
        )
        # Both share one free scale: the covariance of the directions is set to the covariance of the fitted tastes.
        root = np.linalg.qr(np.asarray(people) / np.sqrt(len(people))).R
        axes, sizes, _ = np.linalg.svd(np.asarray(basis) @ root.T, full_matrices=False)
        for scale in settings.scale:
            changed = np.zeros_like(start)
            changed[:, : len(sizes)] = axes * sizes * np.sqrt(scale)
            yield with_mean(
                judged, changed_fit(fitted, {"basis_l2": l2, "scale": scale, "rest": 0.0}, basis=changed)
            )


def with_text_tastes(data: FitData, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Fits in which people differ over single texts too, where several people judged the same ones."""
    settings = fitted.settings
    if not fitted.numbers["item_precision"]:
        return
    rows = judged(True)
    loadings = text_tastes(rows, pooled_margins(fitted, rows), rank=settings.text_directions)
    for rank, scale in product(settings.text_rank, settings.text_scale):
        texts = np.zeros((len(loadings), settings.text_directions), np.float32)
        texts[:, : min(rank, loadings.shape[1])] = loadings[:, :rank] * np.sqrt(scale)
        if not texts.any():
            continue
        vote = fitted.numbers["vote_gain"]
        for gain in dict.fromkeys((float(vote), *(settings.votes if data.seen.posts is not None else ()))):
            numbers = {"text_rank": rank, "text_scale": scale, "vote_gain": gain}
            yield changed_fit(fitted, numbers, texts=texts)


def with_mean(judged: Judged, fitted: Fitted) -> Fitted:
    """The same tastes with the mean taste and the effects of texts fitted again, from those that are there."""
    numbers = fitted.numbers
    rows = judged(bool(numbers["counted"]))
    pairs = pairs_of(rows)
    size = len(pairs.weights)
    direction, effects = _fit_mean(
        pairs,
        padded(rows.texts, size) if numbers["item_precision"] else None,
        padded(shrinkage(fitted, rows), size),
        numbers["l2"],
        numbers["item_precision"],
        (fitted.arrays["direction"], np.append(fitted.arrays["items"], numbers["typical"])),
        steps=fitted.settings.steps,
    )
    *items, typical = np.asarray(effects)
    return changed_fit(fitted, {"typical": typical}, direction=np.asarray(direction), items=np.asarray(items))


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


def with_profiles(data: FitData, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Yield fits whose prior of a person has the mean and the variance that the profile leaves."""
    contexts = group(data.seen)
    known = adapt_users(data.method, fitted, data.seen, contexts, key=data.key, mesh=data.mesh)
    posts = jax.tree.map(lambda leaf: np.asarray(leaf)[contexts.users], data.seen.posts)
    profiles = np.asarray(mean_post(posts))
    center = profiles.mean(axis=0)
    of_penalty = regression_on_profiles(profiles - center, known["weights"], known["covariance"])
    for l2 in fitted.settings.profile_l2:
        weights, left = of_penalty(l2)
        arrays = {"post_mean": center, "profile": weights, "left": left}
        yield changed_fit(
            fitted, {"profile_l2": l2}, **{name: rows.astype(np.float32) for name, rows in arrays.items()}
        )
