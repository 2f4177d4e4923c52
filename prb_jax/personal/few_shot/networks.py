"""Small networks as flax modules, and their training together with parameters of the seen people.

A module is made for its first draws, and around arrays wherever it is run: what is trained, kept in
:class:`~prb_jax.personal.few_shot.protocol.Fitted` and saved is a plain tree of arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from prb_jax.models.checkpoints.array_folder import flat_arrays, from_flat
from prb_jax.personal.few_shot.choices import Array, Context, Responses
from prb_jax.personal.few_shot.fitting import FitData
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Ints
from prb_jax.records.options import option


class Linear(nnx.Module):
    """x w + b: w float32 [inputs, outputs] of variance gain^2 / inputs, b zero."""

    def __init__(self, inputs: int, outputs: int, *, rng: np.random.Generator, gain: float = 1.0) -> None:
        drawn = rng.normal(0, gain / np.sqrt(inputs), (inputs, outputs))
        self.w = nnx.Param(drawn.astype(np.float32))
        self.b = nnx.Param(np.zeros(outputs, np.float32))

    def __call__(self, x: Array) -> jax.Array:
        return x @ self.w[...] + self.b[...]


class MLP(nnx.List[Linear]):
    """Linear maps between layers of these sizes; the last layer has no activation, and ``last`` is its gain."""

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Callable[[Array], Array],
        *,
        rng: np.random.Generator,
        last: float = 1.0,
    ) -> None:
        gains = [*[1.0] * (len(sizes) - 2), last]
        pairs = zip(itertools.pairwise(sizes), gains, strict=True)
        super().__init__(Linear(*ends, rng=rng, gain=gain) for ends, gain in pairs)
        self.activation = activation

    def __call__(self, x: Array) -> jax.Array:
        for layer in self[:-1]:
            x = self.activation(layer(x))
        return self[-1](x)


class Network(nnx.Module):
    """The trained part of a method: the pooled direction and layers; each parameter is declared and drawn in one place.

    Args:
      direction: Pooled direction, float32 [D].
      settings: Settings of the method; frozen.
      rng: Generator of the parameters, in the order of their declaration.
    """

    def __init__(self, direction: np.ndarray, settings: Any, rng: np.random.Generator) -> None:
        self.direction = nnx.Param(direction)

    @classmethod
    def of(cls, arrays: Mapping[str, Any], settings: Any) -> Self:
        """Return the network with these arrays (see `arrays_of`), under any trace; other entries are ignored."""
        graph, places = _layout(cls, len(arrays["direction"]), settings)
        return nnx.merge(graph, from_flat(places, flat_arrays(arrays)))


@cache
def _layout(kind: type[Network], width: int, settings: Any) -> tuple[Any, Any]:
    """The network without its arrays, and a tree of their places."""
    graph, state = nnx.split(kind(np.zeros(width, np.float32), settings, np.random.default_rng(0)))
    return graph, jax.tree.map(lambda _: 0, nnx.to_pure_dict(state))


def arrays_of(network: Network) -> dict[str, Any]:
    """Return the arrays of a network as they are trained and saved: nested dicts, and a list of the layers of an
    `MLP`."""

    def plain(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        below = {name: plain(part) for name, part in tree.items()}
        return [below[place] for place in range(len(below))] if 0 in below else below

    return plain(nnx.to_pure_dict(nnx.state(network)))


def attend(queries: Array, keys: Array, values: Array, mask: Array) -> jax.Array:
    """Return softmax(q k^T / sqrt(h)) v of queries [..., Q, h] over the keys and values [..., T, h] that ``mask``, bool
    [T], allows: at least one."""
    logits = queries @ keys.swapaxes(-1, -2) / np.sqrt(queries.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-1)
    return weights @ values


def train(
    loss: Callable[[Any, jax.Array, jax.Array], jax.Array],
    start: Any,
    *,
    steps: int,
    rate: float,
    key: jax.Array,
) -> Any:
    """Return the parameters after ``steps`` of Adam with a cosine schedule and gradients clipped to norm 1.

    The loss is a function ``(params, key, progress)``: the key is new in each step, and progress runs from 0 to 1.
    """
    solver = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(rate, steps)))

    def step(carry: tuple[Any, Any], now: Array) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        gradient = jax.grad(loss)(params, jax.random.fold_in(key, now), now / steps)
        updates, state = solver.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (start, solver.init(start)), jnp.arange(steps))[0][0]


def adapt_by_descent(
    fitted: Fitted, context: Context, start: Array, margins: Callable[[Array], Array]
) -> jax.Array:
    """Return a person's parameters w after ``adapt_steps`` of Adam from ``start``, those at k = 0, on
    sum_i softplus(-margin_i(w)) + (pull / 2) |w - start|^2, where ``margins`` of w are float32 [k]."""

    def loss(weights: Array, key: jax.Array, progress: Array) -> jax.Array:
        differences = margins(weights)
        pull = 0.5 * fitted.numbers["pull"] * jnp.sum((weights - start) ** 2)
        return jnp.sum(context.mask * jax.nn.softplus(-differences)) + pull

    settings = fitted.settings
    return train(loss, start, steps=settings.adapt_steps, rate=settings.adapt_rate, key=jax.random.key(0))


@dataclass(frozen=True, kw_only=True)
class JointSettings(FewShotSettings):
    """Settings of joint training and of adapting a new person by gradient; of a tuple the validation part chooses."""

    steps: Ints = option((400, 800), "updates: more of them fit the seen people's noise", least=1)
    batch: int = option(512, "choices in an update", least=1)
    rate: float = option(3e-3, "learning rate of Adam at the start of a cosine schedule", above=0)
    pull: Floats = option(
        (0.1, 0.3, 1.0, 3.0), "penalties that pull a new person's parameters to the start", above=0
    )
    adapt_steps: int = option(100, "updates of a new person's parameters", least=1)
    adapt_rate: float = option(0.1, "their learning rate", above=0)
    l2: Floats = option((1e-3, 1e-2, 1e-1, 1.0), "penalties of the pooled direction", above=0)


PairLoss = Callable[[Any, Responses, Array, Any], jax.Array]
"""``(params, pairs, users, settings)`` -> the loss; pairs [b, 2] chosen and rejected, users int32 [b] of
`Choices.person`."""


def fit_jointly(
    data: FitData,
    start: Mapping[str, Any],
    loss: PairLoss,
    *,
    nobody: Mapping[str, Any],
    l2: np.float32,
    mean: Callable[[np.ndarray], Mapping[str, np.ndarray]],
) -> Fitted:
    """Train arrays together with parameters of the seen people, and choose steps and pull on the validation part.

    Args:
      data: Data to fit on, with `JointSettings`.
      start: Initial arrays, and "people", the parameters of the P seen people, which are not kept.
      loss: Loss of a batch of choices; pass the same function object in every call to compile it once.
      nobody: Arrays of a candidate without a personal part.
      l2: Penalty of the pooled direction of ``nobody``.
      mean: Function from the people's parameters [P, ...] to further arrays that are kept.
    """
    settings = data.settings
    rows = (np.stack([data.seen.chosen, data.seen.rejected], axis=1), data.seen.person)

    def candidates() -> Iterator[Fitted]:
        yield data.fitted(nobody, {"l2": l2, "steps": np.int32(0), "pull": max(settings.pull)})
        for steps in settings.steps:
            trained = _train(
                start, data.seen.table, *rows, data.key, loss=loss, settings=settings, steps=steps
            )
            arrays = jax.tree.map(np.asarray, trained)
            arrays |= mean(arrays.pop("people"))
            for pull in settings.pull:
                yield data.fitted(arrays, {"l2": l2, "steps": np.int32(steps), "pull": pull})

    return data.best(candidates())


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
