"""Empirical Bayes: a prior of tastes estimated from the seen people, and each person's posterior in closed form.

    w_u ~ N(mu + L A z_u, L L^T + r I),   t_u ~ N(0, I)
    P(i is chosen over j) = sigmoid(w_u.(e_i - e_j) + t_u.(q_i - q_j) + b_i - b_j)

mu and b, the effects of texts that several people judged, are pooled Bradley-Terry; z_u is the mean of the posts of a
profile. L and q, the directions in which people differ, in the features and over single texts, come from products
across different comparisons of the same person (`taste_prior`, Haseman and Elston 1972). The validation part chooses
how many directions are kept, the variance of all others (low rank and diagonal) and the scales; "nothing personal" is
one of the candidates. Products assume small tastes, and underestimate strong ones. The directions of highest density
are therefore tried too: they are fitted together with the t_u of the seen people, starting from the products. mu and b
are then fitted again, because pooled margins average many tastes and are smaller than margins of the mean taste. r, an
equal variance in all directions, replaces the part that the low rank omits; the validation part chooses it too. A is
ridge regression of the seen people's posterior means.

The posts of a profile are choices too: a vote on a text is a choice of it over a typical text (or the reverse), and the
person's own words are preferred to typical ones, each times a gain g of its kind, in the place of i - j above. Under
r I, own words x_m make a candidate preferred by r g sum_m a_m <e, x_m>, its similarity to them. Adaptation is the
Laplace posterior of choices and posts (one Newton solve in their dual), and a margin is shrunk by the posterior's
variance v, m / sqrt(1 + pi v / 8) (MacKay 1992): its sigmoid is then a probability. One slope, fitted on the
validation part, corrects for shrunk estimates. The posterior of the part r I keeps one variance, a mean over the
directions in which responses differ, so a state stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.personal.few_shot.choices import Array, Choices, group
from prb_jax.personal.few_shot.fitting import (
    ChoicePairs,
    FitData,
    define,
    fit_factors,
    mean_loss,
    minimise,
    padded,
    pairs_of,
)
from prb_jax.personal.few_shot.offset import precision_of
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Ints, adapt_users
from prb_jax.personal.few_shot.taste_posterior import (
    adapt,
    empty_state,
    mean_post,
    pooled_margins,
    score,
    shrinkage,
)
from prb_jax.personal.few_shot.taste_prior import Judgements, judgements_of, taste_covariance, text_tastes
from prb_jax.records.options import option

NUMBERS = (
    "item_precision", "counted", "typical", "rank", "scale", "rest", "basis_l2", "text_rank", "text_scale", "spread",
    "isotropic", "profile_l2", "word_gain", "vote_gain", "slope",
)  # fmt: skip
SLOPES = (0.5, 2.0)
GAINS = ("word_gain", "vote_gain")
MEANS = ("word_mean", "vote_mean")
"""Numbers and arrays of the two kinds of posts: the person's own words, and votes on texts of others."""


@dataclass(frozen=True, kw_only=True)
class BayesSettings(FewShotSettings):
    """Settings of empirical Bayes; of each tuple the validation part chooses one entry."""

    l2: Floats = option((1e-4, 1e-3, 1e-2, 1e-1, 1.0), "penalties of the pooled direction", above=0)
    item_precision: Floats = option(
        (0.1, 1.0, 10.0), "precisions of the effects of texts; no effects are tried too", above=0
    )
    rank: Ints = option((1, 2, 4, 8), "how many directions of taste keep their own variance", least=1)
    scale: Floats = option(
        (0.3, 1.0, 3.0, 10.0), "factors of the estimated covariance; nothing personal is tried too", above=0
    )
    basis_l2: Floats = option(
        (0.3, 1.0),
        "penalties of the directions of taste where they are fitted together with the tastes of the seen people; the "
        "estimated ones are tried too",
        above=0,
    )
    spread: Floats = option(
        (0.3, 0.6, 1.0, 2.0, 4.0),
        "standard deviations of the part of a margin that comes from tastes in all directions alike, tried in rising "
        "order until the loss rises; no such part is tried too",
        above=0,
    )
    profile_l2: Floats = option(
        (0.1, 1.0, 10.0, 100.0),
        "penalties of the regression on profiles, in people; no regression is tried too",
        above=0,
    )
    words: Floats = option(
        (0.3, 1.0, 2.0, 4.0),
        "how much the person's own words weigh as choices over typical ones, in units of their features; not at all is "
        "tried too",
        above=0,
    )
    votes: Floats = option((0.3, 1.0), "the same of votes on texts of others", above=0)
    text_rank: Ints = option((4, 16), "how many directions of single texts people differ in", least=1)
    text_scale: Floats = option(
        (0.5, 1.0, 2.0),
        "factors of the estimated covariance of texts; no such directions are tried too",
        above=0,
    )
    text_directions: int = option(16, "T, how many directions of texts are kept at most", least=1)
    directions: int = option(
        16, "J, how many directions of taste are kept at most: a posterior holds J + J^2 numbers", least=1
    )
    components: int = option(
        64, "principal components of the differences in which the covariance is estimated, at most", least=1
    )
    steps: int = option(100, "updates of the solver at most", least=1)


Judged = Callable[[bool], Judgements]
"""The choices of the seen people, and with True their votes too."""


def fit(data: FitData) -> Fitted:
    """Estimate the prior of people's tastes from the seen people, one part of it after another."""
    return data.once(("whole", data.settings), partial(_with_directions, data))


def fit_parts(data: FitData) -> dict[str, Fitted]:
    """Return three priors, each with a separate slope. "nobody" has no personal part, "simple" has equal variance of
    tastes in all directions and the person's posts, and "bayes" is the prior of `fit`."""
    return fit_simple(data) | {"bayes": fit(data)}


def fit_simple(data: FitData) -> dict[str, Fitted]:
    """Return the first two priors of `fit_parts`."""
    nobody, alike = _nobody(data), _alike(data)
    simple = _with_gains(data, data.best([nobody, *alike]), alike)
    return {"nobody": _with_slope(data, nobody), "simple": _with_slope(data, simple)}


def _judged(data: FitData) -> Judged:
    # Large, and asked for often.
    return data.once(("judged",), lambda: cache(lambda votes: judgements_of(data.seen, votes=votes)))


def _nobody(data: FitData) -> Fitted:
    return data.once(("nobody", data.settings), partial(_fit_nobody, data))


def _fit_nobody(data: FitData) -> Fitted:
    """The prior without tastes: pooled Bradley-Terry, with effects of texts if they help."""
    seen, settings, judged = data.seen, data.settings, _judged(data)
    direction, l2 = data.pooled(steps=settings.steps)
    basis = np.zeros((len(direction), settings.directions), np.float32)
    arrays = {"direction": direction, "items": np.zeros(1, np.float32), "basis": basis}
    if seen.posts is not None:
        arrays |= {"post_mean": np.zeros_like(direction), "profile": np.zeros_like(basis)}
        arrays |= _post_means(seen)
    plain = data.fitted(arrays, {**dict.fromkeys(NUMBERS, 0.0), "l2": l2, "slope": 1.0})
    return data.best([plain, *_with_items(seen, judged, plain)])


def _with_directions(data: FitData) -> Fitted:
    """The whole prior, from the one without tastes on."""
    seen, judged, nobody = data.seen, _judged(data), _nobody(data)
    tastes = data.best([nobody, *_with_tastes(seen, judged, nobody)])
    if tastes.numbers["scale"]:
        tastes = data.best([tastes, *_with_fitted_basis(data, judged, tastes)])
    alike = _alike(data)
    if tastes.numbers["scale"]:
        alike = [*alike, *_with_isotropic(data, judged, tastes)]
    best = data.best([tastes, *alike])
    if seen.posts is not None and best.numbers["scale"]:
        best = data.best([best, *_with_profiles(data, best)])
    best = _with_gains(data, best, alike)
    best = data.best([best, *_with_text_tastes(seen, judged, best)])
    return _with_slope(data, best)


def _alike(data: FitData) -> list[Fitted]:
    """The priors without directions, with tastes in all directions alike."""
    fit = partial(_with_isotropic, data, _judged(data), _nobody(data))
    return data.once(("alike", data.settings), fit)


def _with_isotropic(data: FitData, judged: Judged, base: Fitted) -> list[Fitted]:
    """Fits with tastes in all directions alike, in rising order of their spread: up to the first with a higher loss."""
    deltas, fits = data.seen.deltas, list[Fitted]()
    moment = deltas.T @ deltas / np.float32(len(deltas))
    for spread in sorted(data.settings.spread):
        numbers = {"spread": spread, "isotropic": 1 / precision_of(data.seen, spread)}
        fits.append(data.best([_with_mean(judged, _with(base, numbers, moment=moment))]))
        losses = [float(one.numbers["validation_loss"]) for one in fits[-2:]]
        if losses[-1] > losses[0]:
            break
    return fits


def _with_gains(data: FitData, best: Fitted, others: Iterable[Fitted]) -> Fitted:
    """The best fit in which posts count as choices; their gains are tried on the best one and on others."""
    settings, bases = data.settings, [best, *others]
    if data.seen.posts is None:
        return best
    for gain, there, tried in zip(GAINS, _kinds(data.seen), (settings.words, settings.votes), strict=True):
        if there.any():
            best = data.best([best, *(_with(base, {gain: size}) for base in bases for size in tried)])
            bases = [best]
    return best


def _with_slope(data: FitData, fitted: Fitted) -> Fitted:
    """The same fit with the slope of the lowest loss on the validation part."""
    return data.best([fitted, _with(fitted, {"slope": _best_slope(data.margins(fitted)[0])})])


def _best_slope(margins: np.ndarray) -> float:
    """The factor of margins, within `SLOPES`, with the lowest loss on the validation part."""
    from scipy.optimize import minimize_scalar  # scipy takes long to import

    def loss(slope: float) -> float:
        return float(np.mean(np.logaddexp(0.0, -slope * margins.astype(np.float64))))

    return float(minimize_scalar(loss, bounds=SLOPES, method="bounded").x)  # pyright: ignore[reportAttributeAccessIssue] - the stubs say float


def _with(fitted: Fitted, numbers: dict[str, Any], **arrays: Any) -> Fitted:
    changed = {name: np.float32(value) for name, value in numbers.items()}
    return replace(fitted, arrays=fitted.arrays | arrays, numbers=fitted.numbers | changed)


def _kinds(seen: Choices) -> tuple[np.ndarray, np.ndarray]:
    """Which posts of the seen people are own words, and which are votes, bool [U, M] each."""
    assert seen.posts is not None
    voted = np.asarray(seen.posts.votes) != 0
    return seen.known_posts & ~voted, seen.known_posts & voted


def _post_means(seen: Choices) -> dict[str, np.ndarray]:
    """The typical post of each kind, with which each one is compared."""
    assert seen.posts is not None
    features = np.asarray(seen.posts.features, np.float32)
    rows = [features[of_kind] for of_kind in _kinds(seen)]
    nothing = np.zeros((1, features.shape[-1]), np.float32)
    return {
        name: (posts if len(posts) else nothing).mean(axis=0) for name, posts in zip(MEANS, rows, strict=True)
    }


def _with_items(seen: Choices, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with effects of texts, where several people judged the same ones."""
    if seen.items is None:
        return
    pairs = np.unique(np.stack([np.repeat(seen.person, 2), seen.texts.reshape(-1)], axis=1), axis=0)
    if len(pairs) < 2 * len(np.unique(seen.texts)):  # two judges a text in the mean
        return
    items = np.zeros(int(np.max(seen.items)) + 1, np.float32)
    counted = len(judged(True).person) > len(seen)
    for precision, votes in product(fitted.settings.item_precision, (0.0, 1.0) if counted else (0.0,)):
        yield _with_mean(judged, _with(fitted, {"item_precision": precision, "counted": votes}, items=items))


def _with_tastes(seen: Choices, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Fits with the covariance of tastes, for each rank and scale."""
    settings, margins = fitted.settings, pooled_margins(fitted, judged(False))
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
        yield _with_mean(judged, _with(fitted, {"rank": rank, "scale": scale, "rest": rest}, basis=basis))


def _with_fitted_basis(data: FitData, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
    """Yield fits with the directions of highest density, fitted together with the tastes of the seen people."""
    seen, settings, start = data.seen, fitted.settings, fitted.arrays["basis"]
    tastes = adapt_users(METHOD, fitted, replace(seen, posts=None), group(seen), key=data.key, mesh=data.mesh)
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
            yield _with_mean(
                judged, _with(fitted, {"basis_l2": l2, "scale": scale, "rest": 0.0}, basis=changed)
            )


def _with_text_tastes(seen: Choices, judged: Judged, fitted: Fitted) -> Iterator[Fitted]:
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
        for gain in dict.fromkeys((float(vote), *(settings.votes if seen.posts is not None else ()))):
            numbers = {"text_rank": rank, "text_scale": scale, "vote_gain": gain}
            yield _with(fitted, numbers, texts=texts)


def _with_mean(judged: Judged, fitted: Fitted) -> Fitted:
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
    return _with(fitted, {"typical": typical}, direction=np.asarray(direction), items=np.asarray(items))


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


def _with_profiles(data: FitData, fitted: Fitted) -> Iterator[Fitted]:
    """Yield fits that predict the mean of the prior from the profile: ridge regression of the posterior means."""
    contexts = group(data.seen)
    means = adapt_users(METHOD, fitted, data.seen, contexts, key=data.key, mesh=data.mesh)["weights"]
    posts = jax.tree.map(lambda leaf: np.asarray(leaf)[contexts.users], data.seen.posts)
    profiles = np.asarray(mean_post(posts))
    center = profiles.mean(axis=0)
    centred = profiles - center
    size = np.mean(np.sum(centred**2, axis=1)) + 1e-12
    for l2 in fitted.settings.profile_l2:
        # In the space of the people, who are fewer than the features or not many more.
        kernel = centred @ centred.T + l2 * size * np.eye(len(centred))
        weights = centred.T @ np.linalg.solve(kernel, means - means.mean(axis=0))
        arrays = {"post_mean": center.astype(np.float32), "profile": weights.astype(np.float32)}
        yield _with(fitted, {"profile_l2": l2}, **arrays)


METHOD = define("bayes", BayesSettings, fit, adapt, score, empty_state, pointwise=False)
