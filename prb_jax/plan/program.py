"""The real programs, scoring and training, with shapes in place of arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from prb_jax.checkpoints.load import abstract_params
from prb_jax.errors import MeshError, quote
from prb_jax.models.attention.choice import (
    KERNEL_STREAM_ATTENTION,
    choose_attention,
    trained_stream_attention,
)
from prb_jax.models.attention.splash import visited_share
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import attention_flops_of_layers, matrix_flops_per_token, tree_flops
from prb_jax.models.quantization import quantization_form
from prb_jax.plan.streams import (
    BatchShape,
    drawn_trees,
    extras_of,
    scored_stream,
    split_rows,
    stream_flops,
    tokens_in_buckets,
    trained_streams,
)
from prb_jax.readouts.heads import choose_readout
from prb_jax.readouts.score_tree import is_pointwise, make_score_fn, make_stream_fn
from prb_jax.sharding import check_heads, check_tokens, mesh_shape, parameter_shardings
from prb_jax.training import PASSES, Tuning
from prb_jax.training.config import OptimizerSettings, TrainSettings
from prb_jax.training.objective import make_reward_step
from prb_jax.trees.batches import TreeBatch, TreeMask


@dataclass(frozen=True)
class PlannedProgram:
    """A jitted function and what it is called with."""

    function: Any
    arguments: tuple[Any, ...]  # ``ShapeDtypeStruct`` with shardings in place of arrays
    flops: float  # what its result needs on all chips together, without anything computed twice or in vain
    # how often a step of its attention kernel computes, on average: the share of the steps that compute
    # anything; more than one where a step goes through several blocks of keys; where the number of steps is data, how
    # many there are
    visited: float
    attention: str = ""  # the name of that kernel, or of another implementation; "" if it is not reported
    tokens: int = 0  # of the batch, without padding; 0 if it is not reported, and so for the following
    computed_tokens: int = 0  # the same with the padding of this program
    bucket_tokens: int = 0  # the same where trees are padded to the shapes that suit them best
    # of one chip, what that kernel reads of keys and values, if blocks are read more than once
    kernel_bytes: float = 0.0
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
    """The scorer of :mod:`prb_jax.readouts.score_tree` and a batch of one shape. With the attention "streams" each part
    of the batch has its share of the trees in one packed stream.

    Args:
      quantize: the form in which the layers' matrices are held, see :mod:`prb_jax.models.quantization`.
      attention: one of :data:`prb_jax.models.ATTENTIONS`.

    Raises:
      MeshError: the mesh does not divide the model or the batch; axis and sizes are named.
      CheckpointError: these chips have no matrix units for that form, or such attention.
    """
    check_shape(config, shape, mesh)
    if quantize is not None:
        quantization_form(quantize, mesh=mesh)
    kind = jnp.dtype(dtype)
    readout = choose_readout(
        None if config.num_labels == 1 else "first-logit", num_labels=config.num_labels, where="model"
    )
    weights = abstract_params(config, dtype=kind, head_dtype=jnp.float32, quantize=quantize)
    shardings = parameter_shardings(weights, mesh)
    chosen = choose_attention(mesh, kind, attention, config=config)
    if attention != "streams" and shape.questions_per_user > 1:
        raise MeshError(
            "questions_per_user: people's profiles are shared in packed streams, of which the attention is 'streams', "
            f"found {quote(attention)}"
        )
    options: dict[str, Any] = {"mesh": mesh, "dtype": kind, "readout": readout, "shardings": shardings}
    weights = placed(weights, shardings)
    if attention == "streams":
        function = make_stream_fn(config, **options)
        batch, steps, read = scored_stream(config, shape, mesh=mesh)
        flops = stream_flops(config, shape, mesh=mesh, reads_only=is_pointwise(config))
        return PlannedProgram(
            function, (weights, batch), flops, steps, KERNEL_STREAM_ATTENTION, kernel_bytes=read
        )
    function = make_score_fn(config, attention=attention, **options)
    arguments, visited = (weights, batch_of(shape, mesh)), visited_steps(config, shape)
    return PlannedProgram(function, arguments, forward_flops(config, shape), visited, chosen.name)


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
    """``accumulate`` of :func:`prb_jax.training.objective.make_reward_step`: forward and backward of a batch.

    On TPUs in bfloat16 the trees are packed into streams, as `prb train` does it. Trained weights, AdamW's moments and
    the gradient sums are float32; frozen weights are in ``dtype``.

    Raises:
      MeshError: the mesh does not divide the model or the batch; axis and sizes are named. Or lengths have a spread
        where trees are padded.
      CheckpointError: a head with several labels, or an attention that these devices or this dtype do not have.
    """
    check_shape(config, shape, mesh)
    kind = jnp.dtype(dtype)
    chosen = choose_attention(mesh, kind, attention, config=config, trained=True)
    packed = trained_stream_attention(mesh, kind, attention, config=config) == KERNEL_STREAM_ATTENTION
    if shape.spread and not packed:
        raise MeshError(
            f"spread: is for training over packed streams, found the attention {quote(chosen.name)}"
        )
    settings = TrainSettings(
        dtype=dtype,  # pyright: ignore[reportArgumentType] - checked by the settings
        tuning=tuning,
        remat=remat,  # pyright: ignore[reportArgumentType]
        attention=attention,  # pyright: ignore[reportArgumentType]
        optimizer=OptimizerSettings(learning_rate=1e-4),
    )
    step = make_reward_step(settings, config, mesh=mesh, lengths=(1000,))
    weights = abstract_params(config, dtype=kind, head_dtype=jnp.float32)
    state, frozen = jax.eval_shape(step.begin, weights)
    state, frozen = placed(state, step.state_shardings), placed(frozen, step.frozen_shardings)
    passes = PASSES[tuning]
    if packed:
        trees = drawn_trees(shape, longest=config.max_position_embeddings)
        streams = trained_streams(config, trees, mesh=mesh)
        flops = tree_flops(trees, config) if shape.spread else forward_flops(config, shape)
        return PlannedProgram(
            step.accumulate,
            (state, frozen, streams.batch, streams.extras),
            passes * flops,
            streams.steps,
            KERNEL_STREAM_ATTENTION,
            tokens=sum(tree.tokens for tree in trees),
            computed_tokens=streams.computed,
            bucket_tokens=tokens_in_buckets(config, trees, mesh=mesh),
        )
    extras = extras_of(mesh, shape.batch, shape.responses)
    arguments = (state, frozen, batch_of(shape, mesh), extras)
    flops = passes * forward_flops(config, shape)
    return PlannedProgram(step.accumulate, arguments, flops, visited_steps(config, shape), chosen.name)


def forward_flops(config: DecoderConfig, shape: BatchShape) -> float:
    """Matrices, and attention over the pairs of tokens that see each other."""
    tree = matrix_flops_per_token(config) * shape.tokens + attention_flops_of_layers(config, shape.bucket)
    return shape.batch * tree


def visited_steps(config: DecoderConfig, shape: BatchShape) -> float:
    """Of layers that see all and layers with a window, the dearer."""
    window = config.sliding_window if all(config.layer_windows) else None
    return visited_share(TreeMask(shape.bucket, window))


def executed_flops(jaxpr: Any, *, visited: float = 1.0, int8: float = 1.0) -> float:
    """FLOPs of all matrix products that a traced program runs, on all chips together.

    Unlike the compiler's own count, bodies of scans count as often as they run; of several branches the
    dearest counts.

    Args:
      visited: how often a step in the grid of an attention kernel computes, on average; the steps of a side of the
        grid that is data.
      int8: what an operation of a product of int8 factors counts.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    within, total = partial(executed_flops, visited=visited, int8=int8), 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            contracted = parameters["dimension_numbers"][0][0]
            left = equation.invars[0].aval.shape
            weight = int8 if equation.outvars[0].aval.dtype == jnp.int32 else 1.0
            inner = math.prod(left[i] for i in contracted)
            total += 2.0 * weight * math.prod(equation.outvars[0].aval.shape) * inner
        elif name == "cond":
            total += max(map(within, parameters["branches"]))
        else:
            lists = (value if isinstance(value, tuple | list) else (value,) for value in parameters.values())
            values = chain.from_iterable(lists)
            inner = [value for value in values if hasattr(getattr(value, "jaxpr", value), "eqns")]
            total += sum(map(within, inner)) * _runs(name, parameters, visited)
    return total


def _runs(name: str, parameters: dict[str, Any], visited: float) -> float:
    """How often an operation runs what is inside it, on all chips together."""
    if name == "scan":
        return parameters["length"]
    if name == "shard_map":
        return parameters["mesh"].size
    if name == "pallas_call":
        return visited * math.prod(side for side in parameters["grid_mapping"].grid if isinstance(side, int))
    return 1


def check_shape(config: DecoderConfig, shape: BatchShape, mesh: Mesh) -> None:
    """Raise MeshError for a mesh that does not divide model or batch, and for longer texts than the model takes."""
    check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    shards = mesh_shape(mesh).batch_shards
    if shape.batch % shards:
        axes = f"data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}"
        raise MeshError(f"mesh axis {axes} does not divide a batch of {shape.batch}")
    check_tokens(mesh, shape.tokens)
    longest = shape.prefix + shape.response_length
    if longest > config.max_position_embeddings:
        raise MeshError(
            f"conversations of {longest} tokens (prefix {shape.prefix}, response {shape.response_length}), "
            f"but the model was made for {config.max_position_embeddings} (max_position_embeddings)"
        )


def placed(shapes: Any, shardings: Any) -> Any:
    """Return a tree of shapes with the shardings of its arrays."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, shardings)


def batch_of(shape: BatchShape, mesh: Mesh) -> TreeBatch:
    """Return a batch of padded trees with shapes in place of arrays."""
    count, responses, rows = shape.batch, shape.responses, partial(split_rows, mesh, jnp.int32)
    return TreeBatch(
        prefix=rows(count, shape.prefix),
        prefix_lengths=rows(count),
        responses=rows(count, responses, shape.response_length),
        response_lengths=rows(count, responses),
        read=rows(count, responses),
    )
