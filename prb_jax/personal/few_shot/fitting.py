"""How a method is fitted: its data, the choice among candidates on the validation part, and the solvers inside
``jax.jit`` of convex losses and of a person's most probable weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses, contexts_and_queries
from prb_jax.personal.few_shot.factors import factorised, solved
from prb_jax.personal.few_shot.protocol import (
    Fitted,
    Floats,
    Method,
    State,
    adapt_users,
    few_sizes,
    score_users,
)
from prb_jax.personal.few_shot.taste_prior import Judgements

LOSS = "validation_loss"


@dataclass(frozen=True)
class FitData:
    """The data to fit a method on."""

    method: Method  # the method that evaluates candidates
    seen: Choices  # the choices of the people to fit on
    validation: Choices  # choices of other people, to select every number
    settings: Any  # of the method
    key: jax.Array  # for all random draws
    mesh: Mesh | None = None  # devices over which the people of the validation part are split
    # results that methods of the same choices and key share, see `Method.shares_fits`
    shared: dict[Any, Any] = field(default_factory=dict)

    def once(self, known: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns, computed once for each ``known``: its name, and all else that it depends on
        besides choices and key."""
        if known not in self.shared:
            self.shared[known] = make()
        return self.shared[known]

    def rng(self) -> np.random.Generator:
        """Return a new generator of the host, of the same draws wherever the key is the same."""
        return np.random.default_rng(np.asarray(jax.random.key_data(self.key)))

    def fitted(self, arrays: Mapping[str, Any], numbers: Mapping[str, Any]) -> Fitted:
        """Return a candidate; integers of numpy among its numbers become int32, all others float32."""
        scalars = {
            name: np.int32(value) if isinstance(value, np.integer) else np.float32(value)
            for name, value in numbers.items()
        }
        return Fitted(dict(arrays), scalars, self.settings)

    def pooled(self, l2: Floats = (), *, steps: int = 100) -> tuple[np.ndarray, np.float32]:
        """Return the direction of pooled Bradley-Terry, float32 [D], and its penalty: the one of the lowest loss on the
        validation part among ``l2``, or the setting of this name."""
        penalties = tuple(sorted(l2 or self.settings.l2))

        def fit() -> tuple[np.ndarray, np.float32]:
            return best_direction(pairs_of(self.seen), self.validation.deltas, penalties, steps=steps)

        return self.once(("pooled", penalties, steps), fit)

    def margins(self, fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
        """Return the margins of the queries of the validation part after each number of shots, float32 [m], and their
        places among the choices, int [m]."""
        contexts, queries = contexts_and_queries(self.validation, seed=0)
        shots = self.settings.validation_shots or (2, 8)
        # The same programs before and after the loss is among the numbers.
        numbers = {name: value for name, value in fitted.numbers.items() if name != LOSS}
        fitted, of_shots = replace(fitted, numbers=numbers), []
        for count in shots:
            rows = contexts.first(count, width=max(shots))
            states = adapt_users(self.method, fitted, self.validation, rows, key=self.key, mesh=self.mesh)
            scores = score_users(self.method, fitted, states, self.validation, queries, mesh=self.mesh)
            of_shots.append(scores[queries.mask][:, 0] - scores[queries.mask][:, 1])
        return np.concatenate(of_shots), np.tile(queries.places[queries.mask], len(shots))

    def loss(self, fitted: Fitted) -> float:
        """Return the mean Bradley-Terry loss on the queries of the validation part, over all numbers of shots."""
        if known := self.shared.get((LOSS, self.method.name, id(fitted))):
            return known[1]
        return float(np.mean(np.logaddexp(0.0, -self.margins(fitted)[0], dtype=np.float64)))

    def best(self, candidates: Iterable[Fitted]) -> Fitted:
        """Return the first candidate of the lowest loss, with ``validation_loss`` among its numbers."""
        loss, fitted = min(((self.loss(one), one) for one in candidates), key=lambda pair: pair[0])
        found = replace(fitted, numbers={**fitted.numbers, LOSS: np.float32(loss)})
        self.shared[LOSS, self.method.name, id(found)] = found, loss  # often a candidate of the next call
        return found


def define(
    name: str,
    settings: type,
    fit: Callable[[Any], Fitted],
    adapt: Callable[[Fitted, Context, jax.Array], State],
    score: Callable[[Fitted, State, Responses], jax.Array],
    empty_state: Callable[[Fitted], State],
    *,
    data: type[FitData] = FitData,
    **facts: Any,
) -> Method:
    """Return a method with a ``fit`` that takes its data as one object of the class ``data``; other arguments are the
    fields of `Method`."""

    def fit_parts(
        seen: Choices,
        validation: Choices,
        *,
        settings: Any,
        key: jax.Array,
        mesh: Mesh | None = None,
        shared: dict[Any, Any] | None = None,
    ) -> Fitted:
        for part in (seen, validation):
            part.require(name, method.needs)
        return fit(data(method, seen, validation, settings, key, mesh, {} if shared is None else shared))

    method = Method(name, settings, fit_parts, adapt, score, empty_state, shares_fits=True, **facts)
    return method


def mean_state(fitted: Fitted) -> State:
    """Return the weights at k = 0 of methods that keep the mean of the seen people's weights."""
    return {"weights": jnp.asarray(fitted.arrays["mean"])}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChoicePairs:
    """The choices of a part, ready for a loss over all of them."""

    deltas: Array  # float32 [n, D], chosen minus rejected
    users: Array  # int32 [n], the people numbered from 0 to P - 1, see `Choices.person`
    weights: Array  # float32 [n], 1 for a choice and 0 for padding


def pairs_of(choices: Choices | Judgements) -> ChoicePairs:
    """Return the pairs of all choices, padded to one of few sizes: splits of the same people then share programs."""
    size = few_sizes(len(choices.person))
    columns = (choices.deltas, choices.person, np.ones(len(choices.person), np.float32))
    return ChoicePairs(*(padded(column, size) for column in columns))


def padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Return the rows with zeros below them, ``size`` in all."""
    return np.pad(rows, ((0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)))


def mean_loss(margins: Array, weights: Array) -> jax.Array:
    """Return the mean Bradley-Terry loss, softplus(-margin), of the choices that ``weights`` counts."""
    return jnp.sum(weights * jax.nn.softplus(-margins)) / jnp.maximum(jnp.sum(weights), 1e-9)


def minimise(loss: Callable[[Any], jax.Array], start: Any, *, steps: int, tolerance: float = 1e-6) -> Any:
    """Return the parameters at the minimum of a smooth loss, by at most ``steps`` steps of L-BFGS with a line search;
    it stops where the norm of the gradient is below the tolerance."""
    solver = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(loss)

    def step(carry: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        params, state, count, _ = carry
        value, gradient = value_and_gradient(params, state=state)
        updates, state = solver.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        return optax.apply_updates(params, updates), state, count + 1, optax.tree.norm(gradient)

    def unfinished(carry: tuple[Any, Any, Any, Any]) -> Any:
        return (carry[2] < steps) & (carry[3] > tolerance)

    return jax.lax.while_loop(unfinished, step, (start, solver.init(start), 0, jnp.inf))[0]


@partial(jax.jit, static_argnames="steps")
def fit_direction(pairs: ChoicePairs, l2: Array, start: Array, *, steps: int) -> jax.Array:
    """Return the direction v float32 [D] of the lowest mean softplus(-v.delta) + (l2 / 2) |v|^2."""

    def loss(v: Array) -> jax.Array:
        return mean_loss(pairs.deltas @ v, pairs.weights) + 0.5 * l2 * jnp.sum(v * v)

    return minimise(loss, start, steps=steps)


def fit_factors(
    choices: Choices, margins: np.ndarray, l2: Array, factors: Array, people: np.ndarray, *, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the directions F, float32 [D, J], and the people's weights lam, float32 [P, J], of the lowest mean
    softplus(-(m + delta.F lam_u)) + |lam|^2 / 2n + (l2 / 2) |F|^2, from those that are given on; m are the ``margins``
    float32 [n] without them."""
    pairs, count = pairs_of(choices), len(people)
    rows = padded(margins, len(pairs.weights)), l2, factors, padded(people, few_sizes(count))
    found, weights = _fit_factors(pairs, *rows, steps=steps)
    return np.asarray(found), np.asarray(weights)[:count]


@partial(jax.jit, static_argnames="steps")
def _fit_factors(
    pairs: ChoicePairs, margins: Array, l2: Array, factors: Array, people: Array, *, steps: int
) -> tuple[jax.Array, jax.Array]:
    """The same for padded rows: a person without choices keeps weights of 0."""
    total = jnp.sum(pairs.weights)

    def loss(params: tuple[Array, Array]) -> jax.Array:
        f, lam = params
        personal = jnp.sum((pairs.deltas @ f) * lam[pairs.users], axis=1)
        penalty = 0.5 * jnp.sum(lam * lam) / total + 0.5 * l2 * jnp.sum(f * f)
        return mean_loss(margins + personal, pairs.weights) + penalty

    return minimise(loss, (factors, people), steps=steps)


def best_direction(
    pairs: ChoicePairs, held: np.ndarray, penalties: Floats, *, steps: int
) -> tuple[np.ndarray, np.float32]:
    """Return the direction with the lowest loss on other choices, ``held``, float32 [m, D], and its penalty. In a tie
    the strongest penalty wins."""
    start, tried = jnp.zeros(held.shape[1], jnp.float32), []
    for l2 in sorted(penalties, reverse=True):  # each starts at the stronger one's solution
        start = fit_direction(pairs, l2, start, steps=steps)
        v = np.asarray(start)
        tried.append((float(np.mean(np.logaddexp(0.0, -(held @ v), dtype=np.float64))), -l2, v))
    _, l2, v = min(tried, key=lambda fit: fit[:2])
    return v, np.float32(-l2)


def two_weights(first: np.ndarray, second: np.ndarray) -> tuple[np.float32, np.float32]:
    """Return the weights of two margins float32 [n] of the chosen response, by logistic regression on their sum: of a
    validation part, where two scores of different scales are added to one."""
    both = np.stack([first, second], axis=1)
    scale = np.sqrt(np.mean(both**2, axis=0)) + 1e-6
    pairs = ChoicePairs(
        (both / scale).astype(np.float32), np.zeros(len(both), np.int32), np.ones(len(both), np.float32)
    )
    weights = fit_direction(pairs, np.float32(1e-3), jnp.zeros(2, jnp.float32), steps=50)
    return np.float32(weights[0] / scale[0]), np.float32(weights[1] / scale[1])


IMMOVABLE = np.float32(1e6)
"""A precision, in units of the mean square of a margin, under which k comparisons move nothing: with it "nothing
personal" is among the candidates."""


def immovable_precision(rows: np.ndarray) -> np.float32:
    """Return a precision under which comparisons with these features, float32 [n] or [n, J], move no weights."""
    return IMMOVABLE * np.float32(np.mean(np.sum(rows.reshape(len(rows), -1) ** 2, axis=1)) + 1e-6)


NEWTON_STEPS = 12

_STILL = 1e-4
"""A step of the dual weights, from 0 to 1, after which the next one of Newton's method is below rounding."""


def _step_size(objective: Callable[[Array], jax.Array]) -> jax.Array:
    """Return the share of a Newton step, halved up to seven times, with the lowest objective. Among shares that are
    equal up to rounding the longest wins; near the minimum this is the whole step."""
    halvings = 0.5 ** jnp.arange(0, 8, dtype=jnp.float32)
    objectives = jax.vmap(objective)(halvings)
    least = jnp.min(objectives)
    return halvings[jnp.argmax(objectives <= least + 1e-5 * (1 + jnp.abs(least)))]


def most_probable(features: Array, mask: Array, offset: Array, precision: Array) -> jax.Array:
    """Return the most probable weights of a person under a Gaussian prior: argmax of
    sum_i log sigmoid(offset_i + features_i . o) - (precision / 2) |o|^2.

    Newton's method with step halving. The Hessian is inverted in the space of the k comparisons (Woodbury): the cost
    grows with k^3 and J, not with J^3.

    Args:
      features: float32 [k, J], differences of the chosen and the rejected response.
      mask: bool [k].
      offset: float32 [k], the margins without ``o``.
      precision: float32 [], above 0.

    Returns:
      float32 [J]; zero where the mask is False throughout.
    """
    known = mask.astype(jnp.float32)
    rows = features * known[:, None]
    kernel = rows @ rows.T / precision
    identity = jnp.eye(len(rows), dtype=jnp.float32)

    def newton(_: Array, weights: Array) -> jax.Array:
        margin = offset + rows @ weights
        slope = known * jax.nn.sigmoid(-margin)
        gradient = precision * weights - rows.T @ slope
        root = jnp.sqrt(slope * jax.nn.sigmoid(margin))
        factor = factorised(identity + root[:, None] * kernel * root)
        inner = solved(factor, root * (rows @ gradient)) / precision
        step = (rows.T @ (root * inner) - gradient) / precision
        along = rows @ step

        def objective(share: Array) -> jax.Array:
            loss = jnp.sum(known * jax.nn.softplus(-(margin + share * along)))
            return loss + 0.5 * precision * jnp.sum((weights + share * step) ** 2)

        return weights + _step_size(objective) * step

    return jax.lax.fori_loop(0, NEWTON_STEPS, newton, jnp.zeros(features.shape[1], jnp.float32))


def laplace_posterior(kernel: Array, mask: Array, offset: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the Laplace posterior of a person's weights o ~ N(0, I), given k choices X, float32 [k, J].

    The mode of sum_i log sigmoid(offset_i + X_i . o) - |o|^2 / 2 is X^T a, and the covariance I - (S X)^T (S X).
    Newton's method with step halving in the dual space of the k choices (Rasmussen and Williams 2006, algorithm 3.1),
    so that a step costs k^3, until nothing moves, and two last steps on the gradient, which are exact to rounding.

    Args:
      kernel: float32 [k, k], X X^T.
      mask: bool [k].
      offset: float32 [k], the margins without ``o``.

    Returns:
      a, float32 [k], and S = L^-1 diag(r) as L, float32 [k, k], a lower triangle, and r, float32 [k].
    """
    known = mask.astype(jnp.float32)
    kernel = kernel * known[:, None] * known

    def curved(margins: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        slopes = known * jax.nn.sigmoid(-margins)
        root = jnp.sqrt(slopes * jax.nn.sigmoid(margins))
        inner = jnp.eye(len(known), dtype=jnp.float32) + root[:, None] * kernel * root
        return slopes, root, factorised(inner)

    def newton(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        count, dual, _ = carry
        pull = kernel @ dual
        slopes, root, factor = curved(offset + pull)
        target = root**2 * pull + slopes
        step = target - root * solved(factor, root * (kernel @ target)) - dual

        def objective(share: Array) -> jax.Array:
            moved = dual + share * step
            along = kernel @ moved
            return jnp.sum(known * jax.nn.softplus(-(offset + along))) + 0.5 * moved @ along

        return count + 1, dual + _step_size(objective) * step, jnp.max(jnp.abs(step))

    def moves(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[0] < NEWTON_STEPS) & (carry[2] > _STILL)

    start = (jnp.int32(0), jnp.zeros(len(known), jnp.float32), jnp.float32(jnp.inf))
    dual = jax.lax.while_loop(moves, newton, start)[1]
    for _ in range(2):
        slopes, root, factor = curved(offset + kernel @ dual)
        gradient = dual - slopes
        inner = solved(factor, root * (kernel @ gradient))
        dual = slopes + root * inner
    _, root, factor = curved(offset + kernel @ dual)
    return dual, factor, root
