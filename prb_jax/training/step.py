"""One training step: add up the gradients of microbatches, then update every parameter group once.

:func:`add_gradients` computes the ``gradients`` of each microbatch (one compile per batch shape) and adds them up.
``update`` divides the sums, clips them and applies the optimisers (one compile). The state is a nested dict: the
state of each group by name, and ``step`` (int32, completed updates). The argument ``frozen`` contains the weights that
are not trained; they have neither optimiser state nor gradient. The step minimises a ``loss_fn`` and is independent of
model and method.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.models.decoder import Params
from prb_jax.personal.method import TrainedMethod
from prb_jax.platform.sharding import batch_sharding, replicated, to_global
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import Batch, batch_sizes, lanes
from prb_jax.training.weights import Weights

TrainState = dict[str, Any]
Metrics = dict[str, jax.Array]
Placed = TypeVar("Placed")


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A part of a step that is computed at once, on the host."""

    batch: Batch  # token arrays
    groups: Sequence[
        Sequence[int]
    ]  # indices within the step of the trees of each stream; a single group for sequences
    rows: int  # capacity of a group in trees
    tokens: int  # computed tokens, without padding
    # analytic FLOPs of a forward pass without padding; the last layer counts only at the batch's read places, if the
    # head uses no others
    flops: float
    mixing_flops: float  # the part in attention and recurrent states
    activations: float  # approximate bytes that the backward pass keeps
    extras: Any = None  # further inputs of the loss, set once known

    __repr__ = short_repr


class Parts(Protocol):
    """Sums of a loss over microbatches, a pytree; :class:`prb_jax.training.losses.LossParts` is one."""

    @property
    def weight_sum(self) -> jax.Array:
        """Divisor of the summed gradients."""
        ...

    def __add__(self, other: Any) -> Any: ...

    def means(self) -> dict[str, jax.Array]:
        """Return metrics by name, float32 []; ``loss`` is one of them."""
        ...


Group = Weights | TrainedMethod
"""Parameters under one optimiser: the weights of a model, or the parameters of its users."""

Split = Callable[[Params], tuple[dict[str, Any], Params]]

LossFn = Callable[[Mapping[str, Any], Params, Any, Any], tuple[jax.Array, Any]]
"""(inputs of the groups by name, frozen, batch, extras) -> (sum of the loss, its :class:`Parts`)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the microbatches of a step."""

    gradient: dict[str, Any]  # gradient of the loss by group name, float32
    parts: Any  # :class:`Parts` of the loss

    def __add__(self, other: Sums) -> Sums:
        return Sums(jax.tree.map(jnp.add, self.gradient, other.gradient), self.parts + other.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Compiled functions of training. Build with :func:`make_train_step`."""

    # all parameters -> (initial arrays by group name, frozen parameters)
    split: Split
    # initial arrays by group name -> state
    init: Callable[[Mapping[str, Any]], TrainState]
    # (state, frozen, batch, extras) -> sums of this microbatch
    gradients: Callable[[TrainState, Params, Any, Any], Sums]
    # (sums, more sums) -> sums; the first argument is donated
    add: Callable[[Sums, Sums], Sums]
    # (state, sums) -> (state, metrics); the state is donated. If loss or gradient is not finite, nothing changes, and
    # ``metrics["finite"]`` is 0. Metrics are float32 scalars: :meth:`Parts.means`, ``grad_norm`` of the first group
    # before clipping, ``NAME_grad_norm`` of every other group with parameters, ``learning_rate``, ``finite``.
    update: Callable[[TrainState, Sums], tuple[TrainState, Metrics]]
    groups: Mapping[str, Group]  # trained groups by name
    state_shardings: dict[str, Any]  # for every leaf of the state
    frozen_shardings: dict[str, Any]  # for every leaf of the frozen parameters
    mesh: Mesh  # devices
    # batch shapes for which ``gradients`` is compiled
    compiled: set[Any] = dataclasses.field(default_factory=set)

    def begin(self, params: Params) -> tuple[TrainState, Params]:
        """Return the state before the first step of a model with these parameters, and the frozen parameters."""
        sources, frozen = self.split(params)
        return self.init(sources), frozen

    def inputs(self, state: TrainState) -> dict[str, Any]:
        """Return the variables of the gradient by group name."""
        return {name: group.inputs(state[name]) for name, group in self.groups.items()}

    def kept(self, state: TrainState) -> TrainState:
        """Return the part of a state that a checkpoint stores."""
        return {
            **{name: group.kept(state[name]) for name, group in self.groups.items()},
            "step": state["step"],
        }

    def resume(self, kept: TrainState) -> TrainState:
        """Rebuild the whole state from the stored part."""
        groups = {name: group.resume(kept.get(name, {})) for name, group in self.groups.items()}
        return {**groups, "step": kept["step"]}

    def place(self, batch: Batch, extras: Placed) -> tuple[Any, Placed]:
        """Return a host microbatch with its rows distributed over the mesh."""

        def put(x: Any) -> jax.Array:
            return to_global(np.asarray(x), batch_sharding(self.mesh, np.ndim(x)))

        return jax.tree.map(put, (batch, extras))


def make_train_step(
    loss_fn: LossFn,
    *,
    split: Split,
    groups: Mapping[str, Group],
    frozen_shardings: dict[str, Any],
    learning_rate: optax.Schedule,
    mesh: Mesh,
) -> TrainStep:
    """Return the compiled functions for one loss and one mesh.

    Args:
        loss_fn: Loss to minimise.
        split: Function that splits the parameters of the model into those of each group, and frozen ones.
        groups: Trained parameters by name, the weights of the model first.
        frozen_shardings: Shardings of the frozen parameters.
        learning_rate: Schedule of the first group, for the metrics.
        mesh: Devices.

    Raises:
        MeshError: A mesh axis does not divide a parameter.
    """
    first, everywhere = next(iter(groups)), replicated(mesh)
    shardings = {**{name: group.shardings for name, group in groups.items()}, "step": everywhere}
    inputs = {name: group.inputs(shardings[name]) for name, group in groups.items()}
    sums = Sums(inputs, everywhere)

    def init(sources: Mapping[str, Any]) -> TrainState:
        groups_state = {name: group.start(sources[name]) for name, group in groups.items()}
        return {**groups_state, "step": jnp.zeros((), jnp.int32)}

    def gradients(state: TrainState, frozen: Params, batch: Any, extras: Any) -> Sums:
        trained = {name: group.inputs(state[name]) for name, group in groups.items()}
        return Sums(*jax.grad(loss_fn, has_aux=True)(trained, frozen, batch, extras))

    def update(state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        parts: Parts = sums.parts
        scale = 1.0 / jnp.where(parts.weight_sum > 0, parts.weight_sum, 1.0)
        gradient = jax.tree.map(lambda leaf: leaf * scale, sums.gradient)
        norms = {
            "grad_norm" if name == first else f"{name}_grad_norm": optax.tree.norm(gradient[name])
            for name in groups
            if jax.tree.leaves(gradient[name])
        }
        metrics = {
            **parts.means(),
            **norms,
            "learning_rate": jnp.asarray(learning_rate(state["step"]), jnp.float32),
        }
        finite = jnp.isfinite(jnp.stack([metrics["loss"], *norms.values()])).all()
        updated = {
            name: group.update(state[name], gradient[name], step=state["step"], learn=finite)
            for name, group in groups.items()
        }
        metrics["finite"] = finite.astype(jnp.float32)
        return {**updated, "step": state["step"] + finite.astype(jnp.int32)}, metrics

    return TrainStep(
        split=split,
        init=jax.jit(init, out_shardings=shardings),
        gradients=jax.jit(
            gradients, in_shardings=(shardings, frozen_shardings, None, None), out_shardings=sums
        ),
        add=jax.jit(Sums.__add__, in_shardings=(sums, sums), out_shardings=sums, donate_argnums=0),
        update=jax.jit(
            update, in_shardings=(shardings, sums), out_shardings=(shardings, everywhere), donate_argnums=0
        ),
        groups=groups,
        state_shardings=shardings,
        frozen_shardings=frozen_shardings,
        mesh=mesh,
    )


def add_gradients(step: TrainStep, state: TrainState, frozen: Params, batches: Sequence[Microbatch]) -> Sums:
    """Return the sums of the microbatches of a step, at least one.

    On CPUs several microbatches run concurrently. Each needs memory for its activations and gradients, which limits
    their number. Sums are added in the given order, so they are bitwise equal for any number of concurrent
    microbatches.
    """
    count = lanes(step.mesh)
    if count > 1:
        # Gradients are counted twice because a finished one may wait for its turn to be added.
        held = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(step.inputs(state)))
        count = lanes(step.mesh, held=held + max(part.activations for part in batches))
    waiting: deque[Future[Sums]] = deque()
    sums: Sums | None = None

    def compute(placed: tuple[Any, Any]) -> Sums:
        computed = step.gradients(state, frozen, *placed)
        return jax.block_until_ready(computed) if count > 1 else computed

    def add(more: Sums) -> None:
        nonlocal sums
        sums = more if sums is None else step.add(sums, more)

    with ThreadPoolExecutor(count, thread_name_prefix="gradients") as computing:
        for part in batches:
            placed = step.place(part.batch, part.extras)
            shapes = tuple(leaf.shape for leaf in jax.tree.leaves(placed))
            side_by_side = count > 1 and shapes in step.compiled
            if side_by_side:
                waiting.append(computing.submit(compute, placed))
            while len(waiting) > (count if side_by_side else 0):
                add(waiting.popleft().result())
            if not side_by_side:
                jax.block_until_ready(sums)  # keeps gradients of one microbatch on the device
                with compiling(step.gradients, *batch_sizes(part.batch)):
                    add(compute(placed))
                step.compiled.add(shapes)
        while waiting:
            add(waiting.popleft().result())
    assert sums is not None
    return sums
