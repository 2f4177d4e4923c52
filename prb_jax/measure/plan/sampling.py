"""Costs of sampling on a TPU slice: the sampler's own loop over tokens, compiled for the slice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.behaviour.generation.programs import decoding_mesh, make_program, program_shardings, run_program
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.steps import Stops, empty_prompts, empty_rows
from prb_jax.errors import MeshError
from prb_jax.measure.plan.chips import PlanOptions, slice_of
from prb_jax.measure.plan.planner import Plan, bytes_per_chip, compile_program, mesh_named, shape_of
from prb_jax.measure.plan.program import PlannedProgram, check_shape, placed
from prb_jax.measure.plan.streams import BatchShape
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import RECURRENT
from prb_jax.models.model import matrix_flops_per_token, parameter_shardings
from prb_jax.models.named_shapes import read_model
from prb_jax.models.quantization import quantization_form
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.meshes import make_mesh
from prb_jax.platform.sharding import mesh_shape, replicated
from prb_jax.trees.tree import round_up


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """Plan of one step of the sampler, which draws one token for every sample; bytes are for the whole loop.

    The caches hold keys and values of all prompts and all samples. Tokens per second are a total over all samples,
    at best; None if the program does not fit.
    """

    plan: Plan
    prefix_cache_bytes_per_chip: int
    sample_cache_bytes_per_chip: int
    tokens_per_second: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the plan and of the caches, JSON-ready."""
        names = ("prefix_cache_bytes_per_chip", "sample_cache_bytes_per_chip", "tokens_per_second")
        return self.plan.to_json() | {name: getattr(self, name) for name in names}


def plan_sampling(model: str | Path | DecoderConfig, options: PlanOptions) -> SamplingPlan:
    """Compile the sampler for a TPU slice.

    Args:
      model: see :func:`prb_jax.measure.plan.planner.plan`; the head is a causal language model's.
      options: Trees are prompts with their samples; default: one per batch shard of the mesh. The default mesh is
        the one of `prb sample`, which splits heads and widths over the chips of a slice. The dtype applies to
        weights, activations and caches.

    Raises:
      RunError, MeshError, CheckpointError: see :func:`prb_jax.measure.plan.planner.plan`.
    """
    place, config = slice_of(options), read_model(model)
    devices = make_mesh(options.mesh, devices=place.devices)
    if options.mesh is None:
        devices = decoding_mesh(config, devices)
    trees = options.batch or mesh_shape(devices).batch_shards
    shape = shape_of(options, batch=trees)
    making: Any = {"mesh": devices, "dtype": options.dtype, "quantize": options.quantize}
    program, caches = sampling_program(config, shape, **making)
    token_plan = compile_program(program, place, mesh=mesh_named(options.mesh, devices), batch=trees)
    if token_plan.unknown_loops == 1:  # the loop over tokens ends when all samples end
        token_plan = replace(token_plan, note="the time is for one token of each sample")
    seconds = token_plan.estimated_seconds
    return SamplingPlan(
        plan=token_plan,
        prefix_cache_bytes_per_chip=caches[0],
        sample_cache_bytes_per_chip=caches[1],
        tokens_per_second=None if seconds is None else trees * options.responses / seconds,
    )


def sampling_program(
    config: DecoderConfig, shape: BatchShape, *, mesh: Mesh, dtype: str, quantize: str | None = None
) -> tuple[PlannedProgram, tuple[int, int]]:
    """Return the sampler's loop over tokens, and the bytes of its two caches on a chip: prompts, samples.

    Raises:
      MeshError: the mesh does not divide the model or the batch; the message names axis and sizes.
      CheckpointError: these chips have no matrix units for the ``quantize`` form.
    """
    kind = jnp.dtype(dtype)
    if quantize is not None:
        quantization_form(quantize, mesh=mesh)
    head = LanguageHead(tied=config.tie_word_embeddings, softcap=config.final_logit_softcapping)
    policy = replace(config, head=head)
    check_shape(policy, shape, mesh)
    columns = round_up(shape.prefix, mesh.shape["sequence"])
    if columns < 1:
        raise MeshError(f"prefix: expected at least one token, found {shape.prefix}")
    sampler = make_program(policy, mesh=mesh, dtype=kind)
    weights = abstract_params(policy, dtype=kind, head_dtype=kind, quantize=quantize)
    shardings = program_shardings(sampler)
    prompts = jax.eval_shape(lambda: empty_prompts(sampler, trees=shape.batch, columns=columns))
    rows = jax.eval_shape(
        lambda: empty_rows(
            sampler, trees=shape.batch, samples=shape.responses, columns=round_up(shape.response_length, 16)
        )
    )
    whole = replicated(mesh)

    def small(*sizes: int, of: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, of, sharding=whole)

    named = {
        "rules": jax.tree.map(lambda leaf: small(*leaf.shape, of=leaf.dtype), SampleOptions().rules),
        "stops": Stops(ids=small(4), tokens=small()),  # pyright: ignore[reportArgumentType]
        "seed": small(),
        "most": small(),
        "watched": small(shape.batch, shape.responses, of=jnp.bool_),
    }
    shown = placed((prompts, rows), shardings)
    caches = ((part.cache.keys, part.cache.values, part.cache.recurrent) for part in shown)
    of_prompts, of_rows = map(bytes_per_chip, caches)
    arguments = (placed(weights, parameter_shardings(weights, mesh, config=policy)), *shown)
    attention = choose_attention(mesh, kind, sampler.attention, config=policy).name
    flops = step_flops(policy, shape)
    program = PlannedProgram(run_program(sampler), arguments, flops, attention=attention, named=named)
    return program, (of_prompts, of_rows)


def step_flops(config: DecoderConfig, shape: BatchShape) -> float:
    """Return the FLOPs for the last token of all samples: matrices, head, and attention over prompt and sample.

    Recurrent layers read the state of the prompt twice, and the updates of the sample.
    """
    head, length = 2.0 * config.hidden_size * config.vocab_size, shape.prefix + shape.response_length
    mixing = 0.0
    for slides, mixer in zip(config.layer_windows, config.layer_mixers, strict=True):
        if (sizes := config.recurrence) is not None and mixer == RECURRENT:
            of_sample = (sizes.key_dim + sizes.value_dim) * shape.response_length
            mixing += 4.0 * sizes.value_heads * (sizes.key_dim * sizes.value_dim + of_sample)
            continue
        window = config.sliding_window if slides else None
        seen = length if window is None else min(length, window)
        mixing += 4.0 * config.num_attention_heads * config.head_dim * seen
    return shape.batch * shape.responses * (matrix_flops_per_token(config) + head + mixing)
