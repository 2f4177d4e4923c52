"""The real programs, scoring and training, with shapes in place of arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from prb_jax.checkpoints.load import abstract_params
from prb_jax.errors import MeshError
from prb_jax.models.attention.splash import visited_share
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import attention_flops_of_layers, matrix_flops_per_token
from prb_jax.models.lora import LoraConfig
from prb_jax.models.quantization import quantization_form
from prb_jax.readouts.labels import choose_readout
from prb_jax.readouts.score_fn import make_score_fn
from prb_jax.sharding import batch_sharding, check_heads, check_tokens, mesh_shape, parameter_shardings
from prb_jax.training import Tuning
from prb_jax.training.groups import split_params
from prb_jax.training.objective import USER, WEIGHTS, Extras, RewardObjective, make_reward_training
from prb_jax.training.settings import LossSettings, OptimizerSettings
from prb_jax.training.utilisation import PASSES
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.mask import TreeLayout, TreeMask


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """B trees of P prefix tokens and K responses of R tokens: all of them real in the estimate.

    Attributes:
      batch, prefix, responses, response_length: B, P, K, R.
    """

    batch: int
    prefix: int
    responses: int
    response_length: int

    @property
    def tokens(self) -> int:
        """Of one tree."""
        return self.layout.tokens

    @property
    def layout(self) -> TreeLayout:
        """Of one tree."""
        return TreeLayout(self.prefix, self.responses, self.response_length)


@dataclass(frozen=True)
class Program:
    """A jitted function and what it is called with.

    Attributes:
      function: of :func:`jax.jit`.
      arguments: ``ShapeDtypeStruct`` with shardings in place of arrays.
      flops: what its result needs on all chips together, without anything computed twice or in vain.
      visited: the share of its attention kernel's steps that compute anything.
      named: further arguments by their names.
    """

    function: Any
    arguments: tuple[Any, ...]
    flops: float
    visited: float
    named: Mapping[str, Any] = field(default_factory=dict)


def scoring_program(
    config: DecoderConfig, shape: BatchShape, *, mesh: Mesh, dtype: str, quantize: str | None = None
) -> Program:
    """The scorer of :func:`prb_jax.readouts.score_fn.make_score_fn` and a batch of one shape.

    Args:
      quantize: the form in which the layers' matrices are held, see :mod:`prb_jax.models.quantization`.

    Raises:
      MeshError: the mesh does not divide the model or the batch; axis and sizes are named.
      CheckpointError: these chips have no matrix units for that form.
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
    function = make_score_fn(config, mesh=mesh, dtype=kind, readout=readout, shardings=shardings)
    batch = batch_of(shape, mesh)
    arguments = (placed(weights, shardings), batch)
    return Program(function, arguments, forward_flops(config, shape), visited_steps(config, shape))


def training_program(
    config: DecoderConfig, shape: BatchShape, *, mesh: Mesh, dtype: str, tuning: Tuning, remat: str
) -> Program:
    """``accumulate`` of :func:`prb_jax.training.objective.make_reward_training`: forward and backward of a batch.

    Trained weights, AdamW's moments and the gradient sums are float32; frozen weights are in ``dtype``.

    Raises:
      MeshError: the mesh does not divide the model or the batch; axis and sizes are named.
      CheckpointError: a head with several labels.
    """
    check_shape(config, shape, mesh)
    lora = LoraConfig()
    trainable, frozen = jax.eval_shape(
        lambda params: split_params(params, tuning=tuning, lora=lora),
        abstract_params(config, dtype=jnp.dtype(dtype), head_dtype=jnp.float32),
    )
    objective = RewardObjective(
        config=config,
        mesh=mesh,
        dtype=jnp.dtype(dtype),
        loss=LossSettings(),
        lora_scale=lora.scale if tuning == "lora" else 1.0,
        remat=remat,
    )
    step = make_reward_training(
        objective,
        optimizer=OptimizerSettings(learning_rate=1e-4),
        lengths=(1000,),
        trainable=trainable,
        frozen=frozen,
    ).step
    embedding = abstract_params(config)["embed"]
    state = placed(jax.eval_shape(step.init, {WEIGHTS: trainable, USER: embedding}), step.state_shardings)

    def rows(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=batch_sharding(mesh, len(sizes)))

    count, responses = shape.batch, shape.responses
    extras: Any = {
        "labels": rows(jnp.float32, count, responses),
        "mask": rows(jnp.bool_, count, responses),
        "margin": rows(jnp.float32, count),
        "weights": rows(jnp.float32, count),
        "users": rows(jnp.int32, count),
    }
    arguments = (state, placed(frozen, step.frozen_shardings), batch_of(shape, mesh), Extras(**extras))
    flops = PASSES[tuning] * forward_flops(config, shape)
    return Program(step.accumulate, arguments, flops, visited_steps(config, shape))


def forward_flops(config: DecoderConfig, shape: BatchShape) -> float:
    """Matrices, and attention over the pairs of tokens that see each other."""
    tree = matrix_flops_per_token(config) * shape.tokens + attention_flops_of_layers(config, shape.layout)
    return shape.batch * tree


def visited_steps(config: DecoderConfig, shape: BatchShape) -> float:
    """Of layers that see all and layers with a window, the dearer."""
    window = config.sliding_window if all(config.layer_windows) else None
    return visited_share(TreeMask(shape.layout, window))


def executed_flops(jaxpr: Any, *, visited: float = 1.0, int8: float = 1.0) -> float:
    """FLOPs of all matrix products that a traced program runs, on all chips together.

    Unlike the compiler's own count, bodies of scans count as often as they run; of several branches the
    dearest counts.

    Args:
      visited: the share of the steps in the grid of an attention kernel in which it does anything.
      int8: what an operation of a product of int8 factors counts.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            contracted = parameters["dimension_numbers"][0][0]
            left = equation.invars[0].aval.shape
            each = int8 if equation.outvars[0].aval.dtype == jnp.int32 else 1.0
            inner = math.prod(left[i] for i in contracted)
            total += 2.0 * each * math.prod(equation.outvars[0].aval.shape) * inner
        elif name == "cond":
            total += max(
                executed_flops(branch, visited=visited, int8=int8) for branch in parameters["branches"]
            )
        else:
            inner = sum(executed_flops(each, visited=visited, int8=int8) for each in _inner(parameters))
            total += inner * _runs(name, parameters, visited)
    return total


def _runs(name: str, parameters: dict[str, Any], visited: float) -> float:
    """How often an operation runs what is inside it, on all chips together."""
    if name == "scan":
        return parameters["length"]
    if name == "shard_map":
        return parameters["mesh"].size
    if name == "pallas_call":
        return visited * math.prod(parameters["grid_mapping"].grid)
    return 1


def _inner(parameters: dict[str, Any]) -> list[Any]:
    values = [
        x for each in parameters.values() for x in (each if isinstance(each, tuple | list) else (each,))
    ]
    return [x for x in values if hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")]


def check_shape(config: DecoderConfig, shape: BatchShape, mesh: Mesh) -> None:
    """Raise MeshError for a mesh that does not divide model or batch, and for longer texts than the model takes."""
    check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    shards = mesh_shape(mesh).batch_shards
    if shape.batch % shards:
        raise MeshError(
            f"mesh axis data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} does not divide "
            f"a batch of {shape.batch}"
        )
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
    count, responses = shape.batch, shape.responses

    def rows(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=batch_sharding(mesh, len(sizes)))

    return TreeBatch(
        prefix=rows(count, shape.prefix),
        prefix_lengths=rows(count),
        responses=rows(count, responses, shape.response_length),
        response_lengths=rows(count, responses),
        read=rows(count, responses),
    )
