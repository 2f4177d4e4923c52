"""Empirical Bayes: a prior of tastes estimated from the seen people, and each person's posterior in closed form.

    w_u ~ N(mu + L A z_u, L S L^T + r I),   t_u ~ N(0, I)
    P(i is chosen over j) = sigmoid(w_u.(e_i - e_j) + t_u.(q_i - q_j) + b_i - b_j)

mu and b, the effects of texts that several people judged, are pooled Bradley-Terry; z_u is the mean of the posts of a
profile. L and q, the directions in which people differ, in the features and over single texts, come from products
across different comparisons of the same person (`taste_prior`, Haseman and Elston 1972). The validation part chooses
how many directions are kept, the variance of all others (low rank and diagonal) and the scales; "nothing personal" is
one of the candidates. Products assume small tastes, and underestimate strong ones. The directions of highest density
are therefore tried too: they are fitted together with the t_u of the seen people, starting from the products. mu and b
are then fitted again, because pooled margins average many tastes and are smaller than margins of the mean taste. r, an
equal variance in all directions, replaces the part that the low rank omits; the validation part chooses it too. A is
ridge regression on the profiles, and S, a diagonal, the share of the variance in each direction that they leave open
(`taste_profile`): what a profile tells is no longer uncertain. Of a person without a profile A z_u is 0 and S is I.

The posts of a profile are choices too: a vote on a text is a choice of it over a typical text (or the reverse), and the
person's own words are preferred to typical ones, each times a gain g of its kind, in the place of i - j above. Under
r I, own words x_m make a candidate preferred by r g sum_m a_m <e, x_m>, its similarity to them. Adaptation is the
Laplace posterior of choices and posts (one Newton solve in their dual), and a margin is shrunk by the posterior's
variance v, m / sqrt(1 + pi v / 8) (MacKay 1992): its sigmoid is then a probability. One slope, fitted on the
validation part, corrects for shrunk estimates. The posterior of the part r I keeps one variance, a mean over the
directions in which responses differ, so a state stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import numpy as np

from prb_jax.personal.few_shot.choices import Choices
from prb_jax.personal.few_shot.cross_fit import CrossFitData
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.offset import precision_of
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Ints
from prb_jax.personal.few_shot.taste_posterior import adapt, empty_state, score
from prb_jax.personal.few_shot.taste_prior import judgements_of
from prb_jax.personal.few_shot.taste_steps import (
    Judged,
    Step,
    changed_fit,
    with_fitted_basis,
    with_items,
    with_mean,
    with_profiles,
    with_tastes,
    with_text_tastes,
)
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


def fit(data: CrossFitData) -> Fitted:
    """Estimate the prior of people's tastes from the seen people, one part of it after another."""
    return data.once(("whole", data.settings), partial(_with_directions, data.chosen_by(None)))


def fit_parts(data: CrossFitData) -> dict[str, Fitted]:
    """Return three priors, each with a separate slope. "nobody" has no personal part, "simple" has equal variance of
    tastes in all directions and the person's posts, and "bayes" is the prior of `fit`."""
    whole = fit(data) if data.choosers is None else _with_directions(data)
    return fit_simple(data) | {"bayes": whole}


def fit_simple(data: CrossFitData) -> dict[str, Fitted]:
    """Return the first two priors of `fit_parts`."""
    nobody, alike = _nobody(data), _alike(data)
    simple = _with_gains(data, data.best([nobody, *alike]), alike)
    return {"nobody": _with_slope(data, nobody), "simple": _with_slope(data, simple)}


def _judged(data: FitData) -> Judged:
    # Large, and asked for often.
    return data.once(("judged",), lambda: cache(lambda votes: judgements_of(data.seen, votes=votes)))


def _nobody(data: CrossFitData) -> Fitted:
    """The prior without tastes, chosen by all people of the validation part: the base of every other one."""
    return data.once(("nobody", data.settings), partial(_fit_nobody, data.chosen_by(None)))


def _fit_nobody(data: CrossFitData) -> Fitted:
    """Pooled Bradley-Terry, with effects of texts if they help."""
    seen, settings, judged = data.seen, data.settings, _judged(data)
    direction, l2 = data.pooled(steps=settings.steps)
    basis = np.zeros((len(direction), settings.directions), np.float32)
    arrays = {"direction": direction, "items": np.zeros(1, np.float32), "basis": basis}
    if seen.posts is not None:
        arrays |= {"post_mean": np.zeros_like(direction), "profile": np.zeros_like(basis)}
        arrays |= _post_means(seen)
    plain = data.fitted(arrays, {**dict.fromkeys(NUMBERS, 0.0), "l2": l2, "slope": 1.0})
    return data.best([plain, *with_items(data, judged, plain)])


def _with_directions(data: CrossFitData) -> Fitted:
    """The whole prior, from the one without tastes on."""
    judged, nobody = _judged(data), _nobody(data)
    tastes = _best_with(data, nobody, with_tastes)
    if tastes.numbers["scale"]:
        tastes = _best_with(data, tastes, with_fitted_basis)
    alike = _alike(data)
    if tastes.numbers["scale"]:
        alike = [*alike, *_with_isotropic(data, judged, tastes)]
    best = data.best([tastes, *alike])
    if data.seen.posts is not None and best.numbers["scale"]:
        best = _best_with(data, best, with_profiles)
    best = _with_gains(data, best, alike)
    best = _best_with(data, best, with_text_tastes)
    return _with_slope(data, best)


def _best_with(data: CrossFitData, base: Fitted, step: Step) -> Fitted:
    """The best of a fit and all that a step makes from it."""
    return data.best([base, *data.made((step,), base, partial(step, data, _judged(data), base))])


def _alike(data: CrossFitData) -> list[Fitted]:
    """The priors without directions, with tastes in all directions alike."""
    return _with_isotropic(data, _judged(data), _nobody(data))


def _with_isotropic(data: CrossFitData, judged: Judged, base: Fitted) -> list[Fitted]:
    """Fits with tastes in all directions alike, in rising order of their spread: up to the first with a higher loss."""
    deltas, fits = data.seen.deltas, list[Fitted]()
    moment = data.once(("moment",), lambda: deltas.T @ deltas / np.float32(len(deltas)))

    def fit(spread: float) -> Iterator[Fitted]:
        numbers = {"spread": spread, "isotropic": 1 / precision_of(data.seen, spread)}
        yield with_mean(judged, changed_fit(base, numbers, moment=moment))

    for spread in sorted(data.settings.spread):
        fits += data.made(("spread", spread), base, partial(fit, spread))
        if len(fits) > 1 and data.loss(fits[-1]) > data.loss(fits[-2]):
            break
    return fits


def _with_gains(data: CrossFitData, best: Fitted, others: Iterable[Fitted]) -> Fitted:
    """The best fit in which posts count as choices; their gains are tried on the best one and on others."""
    settings, bases = data.settings, [best, *others]
    if data.seen.posts is None:
        return best

    def fits(gain: str, tried: Floats, base: Fitted) -> Iterator[Fitted]:
        yield from (changed_fit(base, {gain: size}) for size in tried)

    for gain, there, tried in zip(GAINS, _kinds(data.seen), (settings.words, settings.votes), strict=True):
        if there.any():
            rows = [data.made((gain,), base, partial(fits, gain, tried, base)) for base in bases]
            best = data.best([best, *chain.from_iterable(rows)])
            bases = [best]
    return best


def _with_slope(data: CrossFitData, fitted: Fitted) -> Fitted:
    """The same fit with the slope of the lowest loss on the validation part."""
    slope = _best_slope(data.margins_of_choosers(fitted))
    return data.best([fitted, changed_fit(fitted, {"slope": slope})])


def _best_slope(margins: np.ndarray) -> float:
    """The factor of margins, within `SLOPES`, with the lowest loss."""
    from scipy.optimize import minimize_scalar  # scipy takes long to import

    def loss(slope: float) -> float:
        return float(np.mean(np.logaddexp(0.0, -slope * margins.astype(np.float64))))

    return float(minimize_scalar(loss, bounds=SLOPES, method="bounded").x)  # pyright: ignore[reportAttributeAccessIssue] - the stubs say float


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


METHOD = define("bayes", BayesSettings, fit, adapt, score, empty_state, data=CrossFitData, pointwise=False)
