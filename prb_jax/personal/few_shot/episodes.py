"""Training of methods that read a person's comparisons in context.

Each step draws people, and splits the choices of each one into a context of random size and queries.

Where a person answered several questions, the queries are of other questions than the context, and no query shares a
response with its context: a method would learn to recognise responses instead of the person.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prb_jax.personal.few_shot.choices import Array, Choices, Context, Posts, Responses, group
from prb_jax.personal.few_shot.fitting import FitData
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Method
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings(FewShotSettings):
    """Settings of training by episodes."""

    steps: int = option(600, "updates in all", least=1)
    rounds: int = option(
        4, "parts of the steps; after each the validation part is scored, and the best fit is kept", least=1
    )
    batch: int = option(64, "people in a step", least=1)
    shots: int = option(16, "the largest context", least=1)
    rate: float = option(1e-3, "learning rate at the start of a cosine schedule", above=0)
    decay: float = option(1e-2, "weight decay of AdamW", least=0)
    most: int = option(
        64, "choices of one person that training sees; of people with more, a random part", least=2
    )
    l2: Floats = option(
        (1e-3, 1e-2, 1e-1, 1.0),
        "penalties of the pooled direction, of which the validation part chooses one",
        above=0,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class People:
    """The seen people: tables, and [U, c] choices of each one, padded."""

    table: Responses  # the tables
    posts: Posts | None  # the tables
    users: Array  # int32 [U], rows of ``posts``
    chosen: Array  # int32 [U, c], rows of ``table``
    rejected: Array  # int32 [U, c], rows of ``table``
    questions: Array  # int32 [U, c], numbers from 0 within the person
    mask: Array  # bool [U, c]
    several: Array  # bool [U], whether the person answered several questions


def people_of(choices: Choices, *, most: int) -> People:
    """Return the people of a part, with at most ``most`` choices of each."""
    rows = group(choices, seed=0)
    rows = rows.first(most, width=min(most, rows.places.shape[1]))
    questions = np.where(rows.mask, np.asarray(choices.questions)[rows.places], -1)
    return People(
        choices.table,
        choices.posts,
        rows.users,
        np.asarray(choices.chosen)[rows.places],
        np.asarray(choices.rejected)[rows.places],
        np.stack([np.unique(row, return_inverse=True)[1] for row in questions]).astype(np.int32),
        rows.mask,
        np.array([len(set(row[row >= 0])) > 1 for row in questions]),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Episode:
    """People of one step: a context and c queries of each."""

    contexts: Context  # with a leading axis B
    pairs: Responses  # of the queries, chosen and rejected: leading axes [B, c, 2]
    weights: Array  # float32 [B, c], 1 for a query


def draw(people: People, key: jax.Array, *, batch: int, shots: int) -> Episode:
    """Return people at random, a context of 0 to ``shots`` comparisons of each, and the rest as queries."""
    keys = jax.random.split(key, 4)
    who = jax.random.randint(keys[0], (batch,), 0, people.mask.shape[0])
    mask, questions = people.mask[who], people.questions[who]
    count = mask.shape[1]
    # The questions in a random order, the choices of each together: a context then takes whole questions first.
    noise = jax.random.uniform(keys[1], (batch, count + 1))
    within = jax.random.uniform(keys[2], (batch, count))
    several = people.several[who][:, None]
    order = jnp.take_along_axis(noise, questions, axis=1) * several + 1e-4 * within
    places = jnp.argsort(jnp.where(mask, order, jnp.inf), axis=1)
    rank = jnp.argsort(places, axis=1)
    total = jnp.sum(mask, axis=1)
    size = jnp.floor(jax.random.uniform(keys[3], (batch,)) * jnp.minimum(shots + 1, total)).astype(jnp.int32)
    in_context = mask & (rank < size[:, None])
    same = questions[:, :, None] == questions[:, None, :]
    seen = jnp.any(same & in_context[:, None, :], axis=2) & several
    texts = (people.chosen, people.rejected)
    if people.table.items is not None:
        texts = tuple(people.table.items[rows] for rows in texts)
    for one, other in product(texts, texts):
        shared = one[who][:, :, None] == other[who][:, None, :]
        seen |= jnp.any(shared & in_context[:, None, :], axis=2)
    width = min(shots, count)
    chosen, rejected = people.chosen[who], people.rejected[who]
    first = [jnp.take_along_axis(rows, places[:, :width], axis=1) for rows in (chosen, rejected)]
    contexts = Context(
        people.table.take(first[0]),
        people.table.take(first[1]),
        jnp.arange(width) < size[:, None],
        None if people.posts is None else people.posts.take(people.users[who]),
    )
    pairs = people.table.take(jnp.stack([chosen, rejected], axis=-1))
    return Episode(contexts, pairs, (mask & ~in_context & ~seen).astype(jnp.float32))


Loss = Callable[[Method, Fitted, Episode, jax.Array, jax.Array], jax.Array]
"""``(method, fitted, episode, key, progress)`` -> the loss of a step; progress runs from 0 to 1."""


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
    data: FitData,
    start: Fitted,
    *,
    loss: Loss = adapted_loss,
    fixed: tuple[str, ...] = (),
    also: tuple[Fitted, ...] = (),
) -> Fitted:
    """Train the arrays of ``start`` and return the fit of the round with the lowest loss on the validation part.

    Args:
      data: Data to fit on, with `EpisodeSettings`.
      start: Initial arrays, also a candidate.
      loss: Loss of one step.
      fixed: Names of arrays that are not trained.
      also: Candidates that need no training.
    """
    settings: EpisodeSettings = data.settings
    share = -(-settings.steps // settings.rounds)
    kept = {name: start.arrays[name] for name in fixed}
    trained = {name: leaf for name, leaf in start.arrays.items() if name not in fixed}

    def after(steps: int, fitted: Fitted) -> Fitted:
        return replace(fitted, numbers={**fitted.numbers, "steps": np.int32(steps)})

    def candidates() -> Iterator[Fitted]:
        yield after(0, start)
        people, carry = people_of(data.seen, most=settings.most), (trained, _solver(settings).init(trained))
        for done in range(0, settings.rounds * share, share):
            carry = _round(
                *carry, kept, people, start.numbers, data.key, done,
                method=data.method, loss=loss, settings=settings, steps=share,
            )  # fmt: skip
            yield after(done + share, replace(start, arrays={**kept, **jax.tree.map(np.asarray, carry[0])}))
        yield from (after(0, one) for one in also)

    return data.best(candidates())


def _solver(settings: EpisodeSettings) -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(settings.rate, settings.steps, alpha=0.05)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=settings.decay))


@partial(jax.jit, static_argnames=("method", "loss", "settings", "steps"))
def _round(
    arrays: Any,
    state: Any,
    kept: Any,
    people: People,
    numbers: dict[str, Any],
    key: jax.Array,
    first: Array,
    *,
    method: Method,
    loss: Loss,
    settings: EpisodeSettings,
    steps: int,
) -> tuple[Any, Any]:
    solver = _solver(settings)

    def step(carry: tuple[Any, Any], now: Array) -> tuple[tuple[Any, Any], None]:
        arrays, state = carry
        drawn, loss_key = jax.random.split(jax.random.fold_in(key, now))
        episode = draw(people, drawn, batch=settings.batch, shots=settings.shots)

        def of_step(at: Any) -> jax.Array:
            fitted = Fitted({**kept, **at}, numbers, settings)
            return loss(method, fitted, episode, loss_key, now / settings.steps)

        updates, state = solver.update(jax.grad(of_step)(arrays), state, arrays)
        return (optax.apply_updates(arrays, updates), state), None

    return jax.lax.scan(step, (arrays, state), first + jnp.arange(steps))[0]
