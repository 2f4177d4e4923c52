"""The real scoring and training programs, with shapes in place of arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import MeshError
from prb_jax.measure.plan.streams import BatchShape, PlannedStreams, planned_streams
from prb_jax.models.attention.choice import StreamAttention, choose_attention
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.head import choose_readout
from prb_jax.models.model import parameter_shardings
from prb_jax.models.quantization import quantization_form
from prb_jax.models.readouts.score_tree import is_pointwise, make_score_fn
from prb_jax.platform.sharding import check_heads, mesh_shape, replicated
from prb_jax.training import Tuning, step_flops
from prb_jax.training.config import OptimizerSettings, TrainSettings
from prb_jax.training.step import Sums, TrainState, TrainStep
from prb_jax.training.train import make_reward_step
from prb_jax.training.weights import trained_decoder
from prb_jax.trees.streams import StreamBatch

_READ_BACKWARD = 2.5
"""Reads of a backward pass relative to a forward pass: keys twice and values by queries, queries and their
derivatives by keys."""


@dataclass(frozen=True)
class PlannedProgram:
    """A jitted function and its arguments."""

    function: Any
    arguments: tuple[Any, ...]  # ``ShapeDtypeStruct`` with shardings in place of arrays
    flops: float  # needed for the result, on all chips together, without repeated or wasted work
    # how often the body of a loop runs, or a side of a kernel's grid, if its length is data: see
    # :class:`prb_jax.measure.plan.streams.PlannedStreams`
    steps: float = 1.0
    attention: str = ""  # name of its implementation; "" if not reported
    tokens: int = 0  # of the batch, without padding; 0 if not reported, also below
    computed_tokens: int = 0  # the same with padding
    # keys and values that a kernel reads on one chip; it reads some blocks more than once
    kernel_bytes: float = 0.0
    vain_pairs: float | None = None  # see :class:`prb_jax.measure.plan.streams.PlannedStreams`
    named: Mapping[str, Any] = field(default_factory=dict)


def scoring_program(
    config: DecoderConfig,
    shape: BatchShape,
    *,
    mesh: Mesh,
    dtype: str,
    quantize: str | None = None,
    attention: str = "auto",
) -> PlannedProgram:
    """Return the scorer of :mod:`prb_jax.models.readouts.score_tree` with a batch of packed streams.

    Args:
      quantize: Form of the layers' matrices, see :mod:`prb_jax.models.quantization`.
      attention: One of :data:`prb_jax.models.ATTENTIONS`.

    Raises:
      MeshError: the mesh does not divide the model or the batch; the message names axis and sizes.
      CheckpointError: these chips have no matrix units for the ``quantize`` form.
    """
    check_shape(config, shape, mesh)
    if quantize is not None:
        quantization_form(quantize, mesh=mesh)
    kind = jnp.dtype(dtype)
    readout = choose_readout(
        None if config.num_labels == 1 else "first-logit", num_labels=config.num_labels, where="model"
    )
    weights = abstract_params(config, dtype=kind, head_dtype=jnp.float32, quantize=quantize)
    shardings = parameter_shardings(weights, mesh, config=config)
    function = make_score_fn(config, mesh=mesh, dtype=kind, readout=readout, shardings=shardings)
    chosen = choose_attention(mesh, kind, attention, config=config)
    streams = planned_streams(config, shape, mesh=mesh, attention=chosen, reads_only=is_pointwise(config))
    return _planned(function, (placed(weights, shardings), streams.batch), streams, chosen)


def training_program(
    config: DecoderConfig,
    shape: BatchShape,
    *,
    mesh: Mesh,
    dtype: str,
    tuning: Tuning,
    remat: str,
    attention: str = "auto",
) -> PlannedProgram:
    """Return a microbatch of :func:`prb_jax.training.train.make_reward_step`: forward and backward of a batch.

    Trained weights, AdamW's moments and the gradient sums are float32; frozen weights are in ``dtype``.

    Raises:
      MeshError: the mesh does not divide the model or the batch; the message names axis and sizes.
      CheckpointError: a head with several labels.
    """
    check_shape(config, shape, mesh)
    kind = jnp.dtype(dtype)
    settings = TrainSettings(
        dtype=dtype,  # pyright: ignore[reportArgumentType] - checked by the settings
        tuning=tuning,
        remat=remat,  # pyright: ignore[reportArgumentType]
        attention=attention,  # pyright: ignore[reportArgumentType]
        optimizer=OptimizerSettings(learning_rate=1e-4),
    )
    step = make_reward_step(
        settings, trained_decoder(settings, config, mesh=mesh), mesh=mesh, lengths=(1000,)
    )
    weights = abstract_params(config, dtype=kind, head_dtype=jnp.float32)
    state, frozen = jax.eval_shape(step.begin, weights)
    state, frozen = placed(state, step.state_shardings), placed(frozen, step.frozen_shardings)
    chosen = choose_attention(mesh, kind, attention, config=config, trained=True)
    streams = planned_streams(config, shape, mesh=mesh, attention=chosen, reads_only=False)
    function, arguments = accumulation(step, state, frozen, streams.batch, streams.extras(mesh))
    forward = 2 if remat == "full" else 1
    read = (forward + _READ_BACKWARD) * streams.kernel_bytes
    return _planned(function, arguments, replace(streams, kernel_bytes=read), chosen, tuning=tuning)


def accumulation(
    step: TrainStep, state: TrainState, frozen: Params, batch: StreamBatch, extras: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Return a function that adds a microbatch's gradients to the sums of earlier ones, and its arguments.

    A run calls the two functions one after the other. As one program they need the same memory; the state passes
    through it, so all of it is counted.
    """
    parts = jax.eval_shape(step.gradients, state, frozen, batch, extras).parts
    everywhere = jax.tree.map(lambda _: replicated(step.mesh), parts)
    sums = Sums(step.inputs(state), placed(parts, everywhere))

    def accumulate(sums: Sums, state: TrainState, *given: Any) -> tuple[Sums, TrainState]:
        return step.add(sums, step.gradients(state, *given)), state

    shardings = (jax.tree.map(lambda leaf: leaf.sharding, sums), step.state_shardings)
    function = jax.jit(accumulate, out_shardings=shardings, donate_argnums=(0, 1))
    return function, (sums, state, frozen, batch, extras)


def _planned(
    function: Any,
    arguments: tuple[Any, ...],
    streams: PlannedStreams,
    attention: StreamAttention,
    *,
    tuning: Tuning | None = None,
) -> PlannedProgram:
    flops = streams.flops
    if tuning is not None:
        flops = step_flops(flops, streams.mixing_flops, tuning=tuning)
    return PlannedProgram(
        function,
        arguments,
        flops,
        streams.steps,
        attention.name,
        tokens=streams.tokens,
        computed_tokens=streams.computed,
        kernel_bytes=streams.kernel_bytes,
        vain_pairs=streams.vain_pairs,
    )


def executed_flops(jaxpr: Any, *, steps: float = 1.0, int8: float = 1.0, share: float = 1.0) -> float:
    """Return the FLOPs of all matrix products that a traced program runs, on all chips together.

    Unlike in the compiler's own count, bodies of scans count as often as they run; a conditional counts its most
    expensive branch.

    Args:
      steps: how often a loop runs, or a side of a kernel's grid, whose length is data.
      int8: Weight of an operation of a product of int8 factors.
      share: Share of the rows of all experts that a device computes, because it holds some of the experts.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    within, total = partial(executed_flops, steps=steps, int8=int8, share=share), 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            contracted = parameters["dimension_numbers"][0][0]
            left = equation.invars[0].aval.shape
            weight = int8 if equation.outvars[0].aval.dtype == jnp.int32 else 1.0
            inner = math.prod(left[i] for i in contracted)
            total += 2.0 * weight * math.prod(equation.outvars[0].aval.shape) * inner
        elif name == "ragged_dot_general":
            left, right, _ = (variable.aval for variable in equation.invars)
            weight = int8 if equation.outvars[0].aval.dtype == jnp.int32 else 1.0
            total += 2.0 * weight * share * math.prod(left.shape) * right.shape[-1]
        elif name == "cond":
            total += max(map(within, parameters["branches"]))
        else:
            lists = (value if isinstance(value, tuple | list) else (value,) for value in parameters.values())
            values = chain.from_iterable(lists)
            inner = [value for value in values if hasattr(getattr(value, "jaxpr", value), "eqns")]
            if name == "shard_map":
                within = partial(within, share=1.0 / dict(parameters["mesh"].shape).get("tensor", 1))
            total += sum(map(within, inner)) * _runs(name, parameters, steps)
    return total


def _runs(name: str, parameters: dict[str, Any], steps: float) -> float:
    """Return how often an operation runs its inner program, on all chips together."""
    if name == "scan":
        return parameters["length"]
    if name == "while":
        return steps
    if name == "shard_map":
        return parameters["mesh"].size
    if name == "pallas_call":
        return steps * math.prod(side for side in parameters["grid_mapping"].grid if isinstance(side, int))
    return 1


def check_shape(config: DecoderConfig, shape: BatchShape, mesh: Mesh) -> None:
    """Raise MeshError if a mesh does not divide model or batch, or if texts are longer than the model's limit."""
    check_heads(mesh, heads=config.head_counts)
    shards = mesh_shape(mesh).batch_shards
    if shape.batch % shards:
        axes = f"data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}"
        raise MeshError(f"mesh axis {axes} does not divide a batch of {shape.batch}")
    longest = shape.prefix + shape.response_length
    if longest > config.max_position_embeddings:
        raise MeshError(
            f"conversations of {longest} tokens (prefix {shape.prefix}, response {shape.response_length}), "
            f"but the model's limit is {config.max_position_embeddings} (max_position_embeddings)"
        )


def placed(shapes: Any, shardings: Any) -> Any:
    """Return a tree of shapes with the given shardings."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, shardings)
