"""Training and solving inside ``jax.jit``: a convex loss to its minimum, any loss for a number of steps, a person's
most probable weights; and the choice of numbers on the validation part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Array, Choices, Responses, contexts_and_queries
from prb_jax.personal.few_shot.protocol import Fitted, Method, adapt_users, score_users
from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """The choices of a part, ready for a loss over all of them.

    Attributes:
      deltas: float32 [n, D], chosen minus rejected.
      users: int32 [n], the people numbered from 0 to P - 1, see `Choices.person`.
      weights: float32 [n], 1 for a choice and 0 for padding.
    """

    deltas: Array
    users: Array
    weights: Array


def pairs_of(choices: Choices) -> Pairs:
    """Return the pairs of all choices."""
    return Pairs(choices.deltas, choices.person, np.ones(len(choices), np.float32))


def mean_loss(margins: Array, weights: Array) -> jax.Array:
    """Return the mean Bradley-Terry loss, softplus(-margin), of the choices that ``weights`` counts."""
    return jnp.sum(weights * jax.nn.softplus(-margins)) / jnp.maximum(jnp.sum(weights), 1e-9)


def minimise(loss: Callable[[Any], jax.Array], start: Any, *, steps: int, tolerance: float = 1e-6) -> Any:
    """Return the parameters at the minimum of a smooth loss, by L-BFGS with a line search.

    Args:
      loss: of the parameters.
      start: parameters.
      steps: at most.
      tolerance: the norm of the gradient at which it stops.
    """
    solver = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(loss)

    def step(carry: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        params, state, count, _ = carry
        value, gradient = value_and_gradient(params, state=state)
        updates, state = solver.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
        return optax.apply_updates(params, updates), state, count + 1, optax.tree.norm(gradient)

    def open_still(carry: tuple[Any, Any, Any, Any]) -> Any:
        return (carry[2] < steps) & (carry[3] > tolerance)

    return jax.lax.while_loop(open_still, step, (start, solver.init(start), 0, jnp.inf))[0]


def train(
    loss: Callable[[Any, jax.Array, jax.Array], jax.Array],
    start: Any,
    *,
    steps: int,
    rate: float,
    key: jax.Array,
) -> Any:
    """Return the parameters after ``steps`` of Adam with a cosine schedule and gradients clipped to norm 1.

    Args:
      loss: ``(params, key, progress)``; progress runs from 0 to 1.
      start: parameters.
      steps: number of updates.
      rate: the learning rate at the start.
      key: split over the steps.
    """
    solver = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(rate, steps)))

    def step(carry: tuple[Any, Any], now: Array) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        gradient = jax.grad(loss)(params, jax.random.fold_in(key, now), now / steps)
        updates, state = solver.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (start, solver.init(start)), jnp.arange(steps))[0][0]


def descend(loss: Callable[[Any], jax.Array], start: Any, *, steps: int, rate: float) -> Any:
    """Return a person's parameters after ``steps`` of Adam on a loss that draws nothing, as `train`."""
    return train(
        lambda params, key, progress: loss(params), start, steps=steps, rate=rate, key=jax.random.key(0)
    )


def numpy_rng(key: jax.Array) -> np.random.Generator:
    """Return a generator of the host for the same draws wherever ``key`` is the same."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


NEWTON_STEPS = 12

_STILL = 1e-4
"""A step of the dual weights, from 0 to 1, after which the next one of Newton's method is below rounding."""


def most_probable(features: Array, mask: Array, offset: Array, precision: Array) -> jax.Array:
    """Return the most probable weights of a person under a Gaussian prior: argmax of
    sum_i log sigmoid(offset_i + features_i . o) - (precision / 2) |o|^2.

    Newton's method with step halving. The Hessian is inverted in the space of the k comparisons (Woodbury), so that the
    cost grows with k^3 and J, not with J^3.

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
    halvings = 0.5 ** jnp.arange(0, 8, dtype=jnp.float32)

    def newton(_: Array, weights: Array) -> jax.Array:
        margin = offset + rows @ weights
        slope = known * jax.nn.sigmoid(-margin)
        gradient = precision * weights - rows.T @ slope
        root = jnp.sqrt(slope * jax.nn.sigmoid(margin))
        factor = jax.scipy.linalg.cholesky(identity + root[:, None] * kernel * root, lower=True)
        inner = jax.scipy.linalg.cho_solve((factor, True), root * (rows @ gradient)) / precision
        step = (rows.T @ (root * inner) - gradient) / precision
        along = rows @ step

        def objective(share: Array) -> jax.Array:
            loss = jnp.sum(known * jax.nn.softplus(-(margin + share * along)))
            return loss + 0.5 * precision * jnp.sum((weights + share * step) ** 2)

        found = jax.vmap(objective)(halvings)
        # The longest of the steps that are equally good up to rounding: near the minimum the whole Newton step.
        least = jnp.min(found)
        return weights + halvings[jnp.argmax(found <= least + 1e-5 * (1 + jnp.abs(least)))] * step

    return jax.lax.fori_loop(0, NEWTON_STEPS, newton, jnp.zeros(features.shape[1], jnp.float32))


def laplace_posterior(kernel: Array, mask: Array, offset: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the Laplace posterior of a person's weights o ~ N(0, I), of which k choices X, float32 [k, J], are known.

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
    halvings = 0.5 ** jnp.arange(0, 8, dtype=jnp.float32)

    def curved(margins: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        slopes = known * jax.nn.sigmoid(-margins)
        root = jnp.sqrt(slopes * jax.nn.sigmoid(margins))
        inner = jnp.eye(len(known), dtype=jnp.float32) + root[:, None] * kernel * root
        return slopes, root, jax.scipy.linalg.cholesky(inner, lower=True)

    def newton(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        count, dual, _ = carry
        pull = kernel @ dual
        slopes, root, factor = curved(offset + pull)
        target = root**2 * pull + slopes
        step = target - root * jax.scipy.linalg.cho_solve((factor, True), root * (kernel @ target)) - dual

        def objective(share: Array) -> jax.Array:
            moved = dual + share * step
            along = kernel @ moved
            return jnp.sum(known * jax.nn.softplus(-(offset + along))) + 0.5 * moved @ along

        found = jax.vmap(objective)(halvings)
        least = jnp.min(found)  # the longest of the steps that are equally good up to rounding
        share = halvings[jnp.argmax(found <= least + 1e-5 * (1 + jnp.abs(least)))]
        return count + 1, dual + share * step, jnp.max(jnp.abs(step))

    def moves(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[0] < NEWTON_STEPS) & (carry[2] > _STILL)

    start = (jnp.int32(0), jnp.zeros(len(known), jnp.float32), jnp.float32(jnp.inf))
    dual = jax.lax.while_loop(moves, newton, start)[1]
    for _ in range(2):
        slopes, root, factor = curved(offset + kernel @ dual)
        gradient = dual - slopes
        inner = jax.scipy.linalg.cho_solve((factor, True), root * (kernel @ gradient))
        dual = slopes + root * inner
    _, root, factor = curved(offset + kernel @ dual)
    return dual, factor, root


@dataclass(frozen=True)
class Validation:
    """How a method chooses its numbers: by the loss on the queries of people who are not seen.

    Attributes:
      choices: the validation part.
      shots: how many comparisons of each person are adapted on; the losses of these counts are averaged. Of settings
        that name none: 2 and 8.
      seed: which comparisons.
    """

    choices: Choices
    shots: tuple[int, ...] = (2, 8)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shots", self.shots or (2, 8))

    def margins(
        self, method: Method, fitted: Fitted, *, key: jax.Array, mesh: Mesh | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the margins of all queries after each number of shots, float32 [m], and their places among the
        choices, int [m]."""
        contexts, queries = contexts_and_queries(self.choices, seed=self.seed)
        found = []
        for count in self.shots:
            rows = contexts.first(count, width=max(self.shots))
            states = adapt_users(method, fitted, self.choices, rows, key=key, mesh=mesh)
            scores = score_users(method, fitted, states, self.choices, queries, mesh=mesh)[queries.mask]
            found.append(scores[:, 0] - scores[:, 1])
        return np.concatenate(found), np.tile(queries.places[queries.mask], len(self.shots))

    def loss(self, method: Method, fitted: Fitted, *, key: jax.Array, mesh: Mesh | None = None) -> float:
        """Return the mean Bradley-Terry loss on the queries, averaged over the numbers of shots."""
        margins, _ = self.margins(method, fitted, key=key, mesh=mesh)
        return float(np.mean(np.logaddexp(0.0, -margins, dtype=np.float64)))

    def best(
        self, method: Method, fits: Iterable[Fitted], *, key: jax.Array, mesh: Mesh | None = None
    ) -> Fitted:
        """Return the fit of the lowest loss, with ``validation_loss`` among its numbers; the first of equal ones."""
        tried = [(self.loss(method, fitted, key=key, mesh=mesh), fitted) for fitted in fits]
        loss, fitted = min(tried, key=lambda pair: pair[0])
        return replace(fitted, numbers={**fitted.numbers, "validation_loss": np.float32(loss)})


@partial(jax.jit, static_argnames="steps")
def fit_direction(pairs: Pairs, l2: Array, start: Array, *, steps: int) -> jax.Array:
    """Return the direction v float32 [D] of the lowest mean softplus(-v.delta) + (l2 / 2) |v|^2."""

    def loss(v: Array) -> jax.Array:
        return mean_loss(pairs.deltas @ v, pairs.weights) + 0.5 * l2 * jnp.sum(v * v)

    return minimise(loss, start, steps=steps)


def pooled_direction(
    seen: Choices, validation: Choices, *, l2: tuple[float, ...], steps: int
) -> tuple[np.ndarray, float]:
    """Return the direction of pooled Bradley-Terry, and its l2: the one of the lowest loss on the validation part."""
    pairs, held = pairs_of(seen), validation.deltas
    start = jnp.zeros(held.shape[1], jnp.float32)
    tried = []
    for strength in sorted(l2, reverse=True):  # each start is the solution under the stronger penalty before
        start = fit_direction(pairs, strength, start, steps=steps)
        v = np.asarray(start)
        tried.append((float(np.mean(np.logaddexp(0.0, -(held @ v), dtype=np.float64))), -strength, v))
    _, strength, v = min(tried, key=lambda one: one[:2])
    return v, -strength


ALIKE = np.float32(1e6)
"""A precision under which k comparisons move nothing: with it "nothing personal" is among the fits to choose from."""


def two_weights(first: np.ndarray, second: np.ndarray) -> tuple[np.float32, np.float32]:
    """Return the weights of two margins float32 [n] of the chosen response, by logistic regression on their sum.

    They are fitted on a validation part, where two scores of different scales are added to one.
    """
    both = np.stack([first, second], axis=1)
    scale = np.sqrt(np.mean(both**2, axis=0)) + 1e-6
    pairs = Pairs(
        (both / scale).astype(np.float32), np.zeros(len(both), np.int32), np.ones(len(both), np.float32)
    )
    weights = fit_direction(pairs, np.float32(1e-3), jnp.zeros(2, jnp.float32), steps=50)
    return np.float32(weights[0] / scale[0]), np.float32(weights[1] / scale[1])


@dataclass(frozen=True, kw_only=True)
class JointSettings(FewShotSettings):
    """Settings of joint training and of adapting a new person by gradient.

    Attributes:
      steps: updates, of which the validation part chooses: more of them fit the seen people's noise.
      batch: choices in an update.
      rate: learning rate of Adam at the start of a cosine schedule.
      pull: penalties that pull a new person's parameters to the start, of which the validation part chooses one.
      adapt_steps: updates of a new person's parameters.
      adapt_rate: their learning rate.
    """

    steps: tuple[int, ...] = (400, 800)
    batch: int = 512
    rate: float = 3e-3
    pull: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    adapt_steps: int = 100
    adapt_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        above = {"rate": 0, "pull": 0, "adapt_rate": 0}
        check_numbers(self, above=above, least={"steps": 1, "batch": 1, "adapt_steps": 1})


PairLoss = Callable[[Any, Responses, Array, Any], jax.Array]
"""``(params, pairs, users, settings)`` -> the loss; pairs [b, 2] chosen and rejected, users int32 [b] of
`Choices.person`."""


def fit_joint(
    loss: PairLoss,
    start: Any,
    seen: Choices,
    *,
    settings: JointSettings,
    steps: int,
    key: jax.Array,
) -> Any:
    """Return the parameters after so many steps, numpy arrays of the host.

    Args:
      loss: of a batch of choices; one function object for every call, so that it is compiled once.
      start: parameters.
      seen: the people to train on.
      settings: of the training.
      steps: one of those of the settings.
      key: of the batches.
    """
    rows = (np.stack([seen.chosen, seen.rejected], axis=1), seen.person)
    found = _train(start, seen.table, *rows, key, loss=loss, settings=settings, steps=steps)
    return jax.tree.map(np.asarray, found)


@partial(jax.jit, static_argnames=("loss", "settings", "steps"))
def _train(
    start: Any,
    table: Responses,
    pairs: Array,
    users: Array,
    key: jax.Array,
    *,
    loss: PairLoss,
    settings: JointSettings,
    steps: int,
) -> Any:
    def of_batch(params: Any, key: jax.Array, progress: Array) -> jax.Array:
        drawn = jax.random.randint(key, (settings.batch,), 0, len(users))
        return loss(params, table.take(pairs[drawn]), users[drawn], settings)

    return train(of_batch, start, steps=steps, rate=settings.rate, key=key)
