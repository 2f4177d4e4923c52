"""Training of methods that read a person's comparisons in context.

Each step draws people, and splits the choices of each one into a context of random size and queries.

Where a person answered several questions, the queries are of other questions than the context, and no query shares a
response with its context: a method would learn to recognise responses instead of the person.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Posts, Responses, group
from prb_jax.personal.few_shot.fitting import Validation
from prb_jax.personal.few_shot.protocol import Fitted, Method
from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings(FewShotSettings):
    """Settings of training by episodes.

    Attributes:
      steps: updates in all.
      rounds: parts of the steps; after each the validation part is scored, and the best fit is kept.
      batch: people in a step.
      shots: the largest context.
      rate: learning rate at the start of a cosine schedule.
      decay: weight decay of AdamW.
      most: choices of one person that an epoch of training sees; of people with more, a random part.
    """

    steps: int = 600
    rounds: int = 4
    batch: int = 64
    shots: int = 16
    rate: float = 1e-3
    decay: float = 1e-2
    most: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"steps": 1, "rounds": 1, "batch": 1, "shots": 1, "decay": 0, "most": 2}
        check_numbers(self, above={"rate": 0}, least=least)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class People:
    """The seen people: tables, and [U, c] choices of each one, padded.

    Attributes:
      table, posts: the tables.
      users: int32 [U], rows of ``posts``.
      chosen, rejected: int32 [U, c], rows of ``table``.
      questions: int32 [U, c], numbers from 0 within the person.
      mask: bool [U, c].
      several: bool [U], whether the person answered several questions.
    """

    table: Responses
    posts: Posts | None
    users: Array
    chosen: Array
    rejected: Array
    questions: Array
    mask: Array
    several: Array


def people_of(choices: Choices, *, most: int) -> People:
    """Return the people of a part, with at most ``most`` choices of each."""
    rows = group(choices, seed=0)
    rows = rows.first(most, width=min(most, rows.places.shape[1]))
    questions = np.where(rows.mask, np.asarray(choices.questions)[rows.places], -1)
    local = np.stack([np.unique(row, return_inverse=True)[1] for row in questions]).astype(np.int32)
    several = np.array([len(set(row[row >= 0])) > 1 for row in questions])
    return People(
        choices.table,
        choices.posts,
        rows.users,
        np.asarray(choices.chosen)[rows.places],
        np.asarray(choices.rejected)[rows.places],
        local,
        rows.mask,
        several,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episode:
    """People of one step: a context and c queries of each.

    Attributes:
      contexts: with a leading axis B.
      pairs: of the queries, chosen and rejected: leading axes [B, c, 2].
      weights: float32 [B, c], 1 for a query.
    """

    contexts: Context
    pairs: Responses
    weights: Array


def draw(people: People, key: jax.Array, *, batch: int, shots: int) -> Episode:
    """Return people at random, a context of 0 to ``shots`` comparisons of each, and the rest as queries."""
    keys = jax.random.split(key, 4)
    who = jax.random.randint(keys[0], (batch,), 0, people.mask.shape[0])
    mask, questions = people.mask[who], people.questions[who]
    count = mask.shape[1]
    # The questions in a random order, the choices of each together, so that a context takes whole questions first.
    noise = jax.random.uniform(keys[1], (batch, count + 1))
    own = jax.random.uniform(keys[2], (batch, count))
    several = people.several[who][:, None]
    order = jnp.take_along_axis(noise, questions, axis=1) * several + 1e-4 * own
    places = jnp.argsort(jnp.where(mask, order, jnp.inf), axis=1)
    rank = jnp.argsort(places, axis=1)
    total = jnp.sum(mask, axis=1)
    size = jnp.floor(jax.random.uniform(keys[3], (batch,)) * jnp.minimum(shots + 1, total)).astype(jnp.int32)
    in_context = mask & (rank < size[:, None])
    same = questions[:, :, None] == questions[:, None, :]
    seen = jnp.any(same & in_context[:, None, :], axis=2) & several
    names = people.chosen, people.rejected
    if people.table.items is not None:
        names = tuple(people.table.items[each] for each in names)
    for one in names:
        for other in names:
            shared = one[who][:, :, None] == other[who][:, None, :]
            seen |= jnp.any(shared & in_context[:, None, :], axis=2)
    width = min(shots, count)
    first = places[:, :width]

    def rows(table: Array, at: Array) -> Array:
        return jnp.take_along_axis(table, at, axis=1)

    chosen, rejected = people.chosen[who], people.rejected[who]
    contexts = Context(
        people.table.take(rows(chosen, first)),
        people.table.take(rows(rejected, first)),
        jnp.arange(width) < size[:, None],
        None if people.posts is None else people.posts.take(people.users[who]),
    )
    pairs = people.table.take(jnp.stack([chosen, rejected], axis=-1))
    return Episode(contexts, pairs, (mask & ~in_context & ~seen).astype(jnp.float32))


Loss = Callable[[Fitted, Episode, jax.Array, jax.Array], jax.Array]
"""``(fitted, episode, key, progress)`` -> the loss of a step; progress runs from 0 to 1."""


def query_losses(method: Method, fitted: Fitted, states: Any, episode: Episode) -> jax.Array:
    """Return softplus(-margin) of each query, float32 [B, c]; 0 where there is none. The method is pointwise."""
    shape = episode.pairs.features.shape[:3]
    flat = jax.tree.map(lambda leaf: leaf.reshape(shape[0], -1, *leaf.shape[3:]), episode.pairs)
    scores = jax.vmap(method.score, in_axes=(None, 0, 0))(fitted, states, flat).reshape(shape)
    return jax.nn.softplus(scores[..., 1] - scores[..., 0]) * episode.weights


def adapted_loss(
    method: Method, fitted: Fitted, episode: Episode, key: jax.Array, progress: Array
) -> jax.Array:
    """Return the mean loss of the queries under the states that ``method.adapt`` makes of the contexts."""
    states = jax.vmap(method.adapt, in_axes=(None, 0, None))(fitted, episode.contexts, key)
    return jnp.sum(query_losses(method, fitted, states, episode)) / jnp.maximum(jnp.sum(episode.weights), 1)


def fit_episodes(
    method: Method,
    start: Fitted,
    seen: Choices,
    validation: Choices,
    *,
    loss: Loss,
    key: jax.Array,
    mesh: Mesh | None = None,
    fixed: tuple[str, ...] = (),
    also: tuple[Fitted, ...] = (),
) -> Fitted:
    """Train the arrays of ``start`` and return the fit of the round with the lowest loss on the validation part.

    Args:
      method: the method.
      start: its arrays at the start, and its `EpisodeSettings`.
      seen: the people to train on.
      validation: other people.
      loss: of one step.
      key: of people, contexts and whatever the loss draws.
      mesh: devices over which the people of the validation part are split.
      fixed: names of arrays that stay as they are.
      also: fits that may be chosen without training.
    """
    settings: EpisodeSettings = start.settings
    people = people_of(seen, most=settings.most)
    judge = Validation(validation, settings.validation_shots)
    share = -(-settings.steps // settings.rounds)
    kept = {name: start.arrays[name] for name in fixed}
    trained = {name: leaf for name, leaf in start.arrays.items() if name not in fixed}
    carry = _begin(trained, settings=settings)
    fits = [start]
    for part in range(settings.rounds):
        carry = _round(
            *carry, kept, people, start.numbers, key, part * share, loss=loss, settings=settings, steps=share
        )
        fits.append(replace(start, arrays={**kept, **jax.tree.map(np.asarray, carry[0])}))
    numbered = [
        replace(fitted, numbers={**fitted.numbers, "steps": np.int32(part * share)})
        for part, fitted in enumerate(fits)
    ]
    also = tuple(replace(one, numbers={**one.numbers, "steps": np.int32(0)}) for one in also)
    return judge.best(method, [*numbered, *also], key=key, mesh=mesh)


def _solver(settings: EpisodeSettings) -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(settings.rate, settings.steps, alpha=0.05)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=settings.decay))


@partial(jax.jit, static_argnames="settings")
def _begin(arrays: Any, *, settings: EpisodeSettings) -> tuple[Any, Any]:
    return arrays, _solver(settings).init(arrays)


@partial(jax.jit, static_argnames=("loss", "settings", "steps"))
def _round(
    arrays: Any,
    state: Any,
    kept: Any,
    people: People,
    numbers: dict[str, Any],
    key: jax.Array,
    first: Array,
    *,
    loss: Loss,
    settings: EpisodeSettings,
    steps: int,
) -> tuple[Any, Any]:
    solver = _solver(settings)

    def step(carry: tuple[Any, Any], now: Array) -> tuple[tuple[Any, Any], None]:
        arrays, state = carry
        drawn, own = jax.random.split(jax.random.fold_in(key, now))
        episode = draw(people, drawn, batch=settings.batch, shots=settings.shots)
        gradient = jax.grad(
            lambda at: loss(Fitted({**kept, **at}, numbers, settings), episode, own, now / settings.steps)
        )(arrays)
        updates, state = solver.update(gradient, state, arrays)
        return (optax.apply_updates(arrays, updates), state), None

    return jax.lax.scan(step, (arrays, state), first + jnp.arange(steps))[0]
