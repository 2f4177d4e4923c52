"""One training step: gradients of microbatches are added up, then every group of parameters is updated once.

``accumulate`` adds a microbatch's gradient sum and its denominators to the state: one compile for each
shape of batch. ``update`` divides, clips, applies the optimisers and clears the sums: one compile. Both
give the state back in place (its buffers are donated) and in the same shardings. ``gradients`` and ``add`` are the two
halves of ``accumulate``, for several microbatches side by side. :func:`add_gradients` takes all microbatches of a step.

The state is a nested dict: the state of each group by its name, ``step`` (int32, updates so far), ``acc`` (the
gradient sums of each group since the last update) and ``parts`` (the sums of the loss). Weights that are not
trained are an argument, ``frozen``; they have no optimiser state and no gradient. What is minimised is a
``loss_fn``: the step knows neither model nor method.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.models.decoder import Params
from prb_jax.platform.sharding import batch_sharding, replicated, to_global
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import Batch, batch_sizes, lanes

TrainState = dict[str, Any]
Metrics = dict[str, jax.Array]
Placed = TypeVar("Placed")

SUMS = ("acc", "parts")  # what of a state are sums since the last update, which each step makes anew


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """The part of a step that is computed at a time, on the host."""

    batch: Batch  # the arrays of its tokens
    groups: Sequence[
        Sequence[int]
    ]  # places in the step of the trees of each stream; one group of all sequences
    rows: int  # trees that a group has room for
    tokens: int  # that are computed, without padding
    flops: float  # of a forward pass on paper, without padding
    activations: float  # bytes that its backward pass keeps, about
    extras: Any = None  # what the loss needs besides, once it is known

    __repr__ = short_repr


class Parts(Protocol):
    """Sums of a loss over microbatches, a pytree; :class:`prb_jax.training.losses.LossParts` is one."""

    @property
    def weight_sum(self) -> jax.Array:
        """The number by which the sum of the gradients is divided."""
        ...

    def __add__(self, other: Any) -> Any: ...

    def means(self) -> dict[str, jax.Array]:
        """float32 [] by name; ``loss`` is one of them."""
        ...


class ParameterGroup(Protocol):
    """Parameters that are trained together, by one rule: :class:`prb_jax.training.weights.Weights`, and every method of
    personalisation (:class:`prb_jax.personal.method.TrainedMethod`)."""

    @property
    def shardings(self) -> Any:
        """One sharding for each leaf of the state."""
        ...

    def start(self, source: Any, /) -> Any:
        """A new state, from the arrays that the group starts with."""
        ...

    def inputs(self, state: Any, /) -> Any:
        """The float32 arrays of the state by which the loss is differentiated."""
        ...

    def update(self, state: Any, gradient: Any, /, *, step: jax.Array, learn: jax.Array) -> Any:
        """The state after one update by a mean gradient; as it was where ``learn`` (bool []) is False. ``step``,
        int32 [], counts the updates made so far."""
        ...

    def kept(self, state: Any, /) -> Any:
        """What a checkpoint holds of the state."""
        ...

    def resume(self, kept: Any, /) -> Any:
        """The whole state again."""
        ...


Split = Callable[[Params], tuple[dict[str, Any], Params]]

LossFn = Callable[[Mapping[str, Any], Params, Any, Any], tuple[jax.Array, Any]]
"""(inputs of the groups by name, frozen, batch, extras) -> (sum of the loss, its :class:`Parts`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The compiled functions of training. Build with :func:`make_train_step`."""

    # all parameters -> (the arrays that each group starts with, by its name; those that are not trained)
    split: Split
    # arrays that each group starts with, by its name -> state
    init: Callable[[Mapping[str, Any]], TrainState]
    # (state, frozen, batch, extras) -> state with a microbatch added; the state is donated
    accumulate: Callable[[TrainState, Params, Any, Any], TrainState]
    # (state without its sums, frozen, batch, extras) -> the sums of this microbatch alone. The state is kept.
    gradients: Callable[[TrainState, Params, Any, Any], TrainState]
    # (sums, more sums) -> sums; the first ones are donated
    add: Callable[[TrainState, TrainState], TrainState]
    # (state) -> (state, metrics); the state is donated. If loss or gradient are not finite, nothing but the sums
    # changes, and ``metrics["finite"]`` is 0. Metrics are float32 scalars: those of :meth:`Parts.means`,
    # ``grad_norm`` of the first group before clipping, ``NAME_grad_norm`` of each other one that has parameters,
    # ``learning_rate``, ``finite``.
    update: Callable[[TrainState], tuple[TrainState, Metrics]]
    # (state without its sums) -> the sums before the first microbatch
    empty_sums: Callable[[TrainState], TrainState]
    # (state) -> what the loss is differentiated by, by the names of the groups
    inputs: Callable[[TrainState], dict[str, Any]]
    groups: Mapping[str, ParameterGroup]  # what is trained, by name
    state_shardings: dict[str, Any]  # for every leaf of the state
    frozen_shardings: dict[str, Any]  # for every leaf of the frozen parameters
    mesh: Mesh  # devices
    # the shapes of batches for which ``gradients`` is compiled
    compiled: set[Any] = dataclasses.field(default_factory=set)

    def begin(self, params: Params) -> tuple[TrainState, Params]:
        """The state before the first step of a model with these parameters, and those that are not trained."""
        sources, frozen = self.split(params)
        return self.init(sources), frozen

    def kept(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state: not its sums, which each step makes anew."""
        groups = {name: group.kept(state[name]) for name, group in self.groups.items()}
        return {**groups, "step": state["step"]}

    def resume(self, kept: TrainState) -> TrainState:
        """The whole state again."""
        groups = {name: group.resume(kept.get(name, {})) for name, group in self.groups.items()}
        state = {**groups, "step": kept["step"]}
        return {**state, **self.empty_sums(state)}

    def place(self, batch: Batch, extras: Placed) -> tuple[Any, Placed]:
        """A microbatch of the host, its rows dealt over the mesh."""

        def put(x: Any) -> jax.Array:
            return to_global(np.asarray(x), batch_sharding(self.mesh, np.ndim(x)))

        return jax.tree.map(put, (batch, extras))


def sums_of(state: TrainState) -> TrainState:
    """The sums since the last update, of a state."""
    return {name: state[name] for name in SUMS}


def without_sums(state: TrainState) -> TrainState:
    """All of a state but its sums."""
    return {name: value for name, value in state.items() if name not in SUMS}


def make_train_step(
    loss_fn: LossFn,
    *,
    split: Split,
    groups: Mapping[str, ParameterGroup],
    frozen_shardings: dict[str, Any],
    zero: Callable[[], Parts],
    learning_rate: optax.Schedule,
    mesh: Mesh,
) -> TrainStep:
    """Compiled functions for one loss and one mesh.

    Args:
        loss_fn: what is minimised.
        split: parts the parameters of the model into what each group starts with, and what is not trained.
        groups: what is trained, by name; the first is the model's own.
        frozen_shardings: of what is not trained.
        zero: the parts of no comparison.
        learning_rate: of the first group, to be reported.
        mesh: devices.

    Raises:
        MeshError: a mesh axis does not divide a parameter.
    """
    first = next(iter(groups))
    everywhere = replicated(mesh)
    group_shardings = {name: group.shardings for name, group in groups.items()}
    shardings = {
        **group_shardings,
        "step": everywhere,
        "acc": {name: group.inputs(group_shardings[name]) for name, group in groups.items()},
        "parts": jax.tree.map(lambda _: everywhere, jax.eval_shape(zero)),
    }

    def inputs_of(state: TrainState) -> dict[str, Any]:
        return {name: group.inputs(state[name]) for name, group in groups.items()}

    def empty_sums(state: TrainState) -> TrainState:
        return {"acc": jax.tree.map(jnp.zeros_like, inputs_of(state)), "parts": zero()}

    def init(sources: Mapping[str, Any]) -> TrainState:
        state = {name: group.start(sources[name]) for name, group in groups.items()}
        return {**state, "step": jnp.zeros((), jnp.int32), **empty_sums(state)}

    def gradients(state: TrainState, frozen: Params, batch: Any, extras: Any) -> TrainState:
        gradient, parts = jax.grad(loss_fn, has_aux=True)(inputs_of(state), frozen, batch, extras)
        return {"acc": gradient, "parts": parts}

    def add(sums: TrainState, more: TrainState) -> TrainState:
        return {
            "acc": jax.tree.map(jnp.add, sums["acc"], more["acc"]),
            "parts": sums["parts"] + more["parts"],
        }

    def accumulate(state: TrainState, frozen: Params, batch: Any, extras: Any) -> TrainState:
        return {**state, **add(sums_of(state), gradients(state, frozen, batch, extras))}

    def update(state: TrainState) -> tuple[TrainState, Metrics]:
        parts: Parts = state["parts"]
        scale = 1.0 / jnp.where(parts.weight_sum > 0, parts.weight_sum, 1.0)
        gradients = jax.tree.map(lambda leaf: leaf * scale, state["acc"])
        norms = {
            "grad_norm" if name == first else f"{name}_grad_norm": optax.tree.norm(gradients[name])
            for name in groups
            if jax.tree.leaves(gradients[name])
        }
        metrics = {
            **parts.means(),
            **norms,
            "learning_rate": jnp.asarray(learning_rate(state["step"]), jnp.float32),
        }
        finite = jnp.isfinite(jnp.stack([metrics["loss"], *norms.values()])).all()
        updated = {
            name: group.update(state[name], gradients[name], step=state["step"], learn=finite)
            for name, group in groups.items()
        }
        metrics["finite"] = finite.astype(jnp.float32)
        return {
            **updated,
            "step": state["step"] + finite.astype(jnp.int32),
            **empty_sums(state),
        }, metrics

    sums = sums_of(shardings)
    return TrainStep(
        split=split,
        init=jax.jit(init, out_shardings=shardings),
        accumulate=jax.jit(
            accumulate,
            in_shardings=(shardings, frozen_shardings, None, None),
            out_shardings=shardings,
            donate_argnums=0,
        ),
        gradients=jax.jit(
            gradients,
            in_shardings=(without_sums(shardings), frozen_shardings, None, None),
            out_shardings=sums,
        ),
        add=jax.jit(add, in_shardings=(sums, sums), out_shardings=sums, donate_argnums=0),
        update=jax.jit(
            update, in_shardings=(shardings,), out_shardings=(shardings, everywhere), donate_argnums=0
        ),
        empty_sums=jax.jit(empty_sums, out_shardings=sums),
        inputs=inputs_of,
        groups=groups,
        state_shardings=shardings,
        frozen_shardings=frozen_shardings,
        mesh=mesh,
    )


def add_gradients(
    step: TrainStep, state: TrainState, frozen: Params, batches: Sequence[Microbatch]
) -> TrainState:
    """Return the state, which is donated, with the gradient sums of the microbatches of a step.

    They are added in the order in which they are given, however many are computed side by side: the sums have the
    same bits. Each that is computed holds activations and gradients of its own, so that there are fewer at a time where
    these would fill the memory.
    """
    if lanes(step.mesh) == 1:
        for part in batches:
            placed = step.place(part.batch, part.extras)
            with compiling(step.accumulate, *batch_sizes(part.batch)):
                state = step.accumulate(state, frozen, *placed)
        return state
    rest, sums = without_sums(state), sums_of(state)
    # Gradients are held twice: one that is done may wait for its turn to be added.
    held = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(sums))
    count = lanes(step.mesh, held=held + max((part.activations for part in batches), default=0.0))
    waiting: deque[Callable[[], TrainState]] = deque()

    def gradients(placed: tuple[Any, Any]) -> TrainState:
        return jax.block_until_ready(step.gradients(rest, frozen, *placed))

    with ThreadPoolExecutor(count, thread_name_prefix="gradients") as computing:
        for part in batches:
            placed = step.place(part.batch, part.extras)
            shapes = tuple(leaf.shape for leaf in jax.tree.leaves(placed))
            if shapes in step.compiled:
                waiting.append(computing.submit(gradients, placed).result)
            else:  # by this thread alone
                with compiling(step.gradients, *batch_sizes(part.batch)):
                    first = gradients(placed)
                step.compiled.add(shapes)
                waiting.append(lambda first=first: first)
            if len(waiting) > count:
                sums = step.add(sums, waiting.popleft()())
        while waiting:
            sums = step.add(sums, waiting.popleft()())
    return {**rest, **sums}
