"""Policy, reference, value function and reward model of `prb ppo` on one TPU slice: memory and programs of each.

All weights stay on the chips through a whole step. The programs run one after another, so only one at a time
needs memory beyond its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.behaviour.generation.programs import decoding_mesh, make_program, placing_program
from prb_jax.behaviour.rl.learner import make_look
from prb_jax.behaviour.rl.objective import (
    FROM_REWARDS,
    POLICY,
    VALUE,
    Actor,
    Extras,
    Targets,
    make_policy_step,
)
from prb_jax.behaviour.rl.sections import RolloutBatchSettings, RolloutSettings, ValueSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.measure.plan.chips import PlanOptions, slice_of
from prb_jax.measure.plan.planner import (
    Plan,
    bytes_per_chip,
    compile_program,
    first_that_fits,
    mesh_named,
    shape_of,
)
from prb_jax.measure.plan.program import (
    PlannedProgram,
    accumulation,
    check_shape,
    placed,
    scoring_program,
)
from prb_jax.measure.plan.sampling import sampling_program
from prb_jax.measure.plan.streams import BatchShape, PlannedStreams, planned_streams, split_rows
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.model import parameter_shardings
from prb_jax.models.named_shapes import read_model
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.meshes import make_mesh
from prb_jax.platform.sharding import mesh_shape
from prb_jax.training import Tuning, step_flops
from prb_jax.trees.packing import READS_STEP
from prb_jax.trees.response_reads import Reads
from prb_jax.trees.tree import round_up


@dataclass(frozen=True, kw_only=True)
class PolicyPlan:
    """Plan of policy training on one slice. Bytes are for one chip."""

    fits: bool  # every program fits beside all held memory
    mesh: str
    batch: int  # prompts per microbatch
    hbm_bytes_per_chip: int
    held: Mapping[str, int]  # weights and states that stay on the chips, by part
    shared: Mapping[str, str]  # for a part without memory, the part that it uses
    caches: int  # bytes for the rollouts, freed before other programs run
    peaks: Mapping[str, int]  # peak of each program with all held memory
    # compiled for one microbatch each: "place" (splits weights as drawing needs them; missing if the plan's mesh
    # does so already), "draw" (one token per rollout), "look", "update" and "score"
    programs: Mapping[str, Plan]
    remat: str  # rematerialisation policy of the update

    @property
    def peak_bytes_per_chip(self) -> int:
        """Peak bytes of the whole step."""
        return max(self.peaks.values())

    def to_json(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        programs = {name: plan.to_json() for name, plan in self.programs.items()}
        return {**asdict(self), "peak_bytes_per_chip": self.peak_bytes_per_chip, "programs": programs}


def plan_policy(
    model: str | Path | DecoderConfig,
    options: PlanOptions,
    *,
    reward: str | Path | DecoderConfig | None = None,
) -> PolicyPlan:
    """Compile the programs of one step of `prb ppo` with a value function, for a TPU slice.

    Args:
      model: Model of the policy, see :func:`prb_jax.measure.plan.planner.plan`.
      options: Trees are prompts with their rollouts; default: one per batch shard of the mesh. The policy is tuned
        by adapters by default.
      reward: Reward model on the same mesh, given like `model`; None for one elsewhere.

    Raises:
      RunError: libtpu is missing.
      MeshError: an unknown topology, or a mesh that does not divide the chips, a model or the batch.
      CheckpointError: a configuration is unsupported.
    """
    return first_that_fits(
        lambda remat: _plan_policy(model, replace(options, remat=remat), reward=reward), options.remat
    )


def _plan_policy(
    model: str | Path | DecoderConfig, options: PlanOptions, *, reward: str | Path | DecoderConfig | None
) -> PolicyPlan:
    """Return the plan with the policy of rematerialisation of the options."""
    place = slice_of(options)
    devices = make_mesh(options.mesh, devices=place.devices)
    shape = shape_of(options, batch=options.batch or mesh_shape(devices).batch_shards)
    config, dtype = read_model(model), options.dtype
    config = replace(config, head=LanguageHead(config.tie_word_embeddings, config.final_logit_softcapping))
    check_shape(config, shape, devices)
    settings = PpoSettings(
        tuning=options.tuning or "lora",  # pyright: ignore[reportArgumentType] - checked by the settings
        remat=options.remat,  # pyright: ignore[reportArgumentType]
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        rollout=RolloutSettings(n=shape.responses, max_new_tokens=shape.response_length),
        batch=RolloutBatchSettings(prompts=shape.batch),
        value=ValueSettings(trunk=options.value_trunk or "own"),
    )
    held, shared, learning = _policy_programs(config, settings, shape, devices)
    drawing, caches, given = _drawing_programs(config, shape, devices, dtype=dtype, tuning=settings.tuning)
    programs = drawing | learning
    if reward is not None:
        score = scoring_program(read_model(reward), shape, mesh=devices, dtype=dtype)
        held["reward model"] = given["score"] = bytes_per_chip(score.arguments[0])
        programs["score"] = score
    mesh = mesh_named(options.mesh, devices)
    plans = {
        name: compile_program(planned, place, mesh=mesh, batch=shape.batch)
        for name, planned in programs.items()
    }
    for name, program in learning.items():  # XLA drops arguments that a program does not use
        beside = bytes_per_chip(program.arguments[-2:])  # a batch, and the inputs of its loss
        given[name] = plans[name].argument_bytes_per_chip - beside
    whole, room = sum(held.values()), place.chip.hbm_bytes
    peaks = {name: planned.peak_bytes_per_chip + whole - given[name] for name, planned in plans.items()}
    return PolicyPlan(
        fits=all(plan.fits for plan in plans.values()) and max(peaks.values()) <= room,
        mesh=mesh,
        batch=shape.batch,
        hbm_bytes_per_chip=room,
        held=held,
        shared=shared,
        caches=caches,
        peaks=peaks,
        programs=plans,
        remat=settings.remat,
    )


def _policy_programs(
    config: DecoderConfig, settings: PpoSettings, shape: BatchShape, mesh: Mesh
) -> tuple[dict[str, int], dict[str, str], dict[str, PlannedProgram]]:
    """Return the memory held, the parts shared, and the programs "look" and "update"."""
    kind, full = jnp.dtype(settings.dtype), settings.tuning == "full"
    actor = Actor(settings, config, mesh)
    step = make_policy_step(actor, FROM_REWARDS)
    weights = abstract_params(config, dtype=jnp.dtype("float32") if full else kind)
    state, frozen = jax.eval_shape(step.begin, weights)
    state, frozen = placed(state, step.state_shardings), placed(frozen, step.frozen_shardings)
    chosen = choose_attention(mesh, kind, config=config, trained=True)
    streams = planned_streams(config, shape, mesh=mesh, attention=chosen, reads_only=False)
    extras = _extras(streams, shape, mesh)
    accumulate, arguments = accumulation(step, state, frozen, streams.batch, extras)
    own_trunk = settings.value.trunk == "own"
    trained, copies = ("weights", "a copy") if full else ("adapters", "adapters")
    value = f"value function ({copies if own_trunk else 'a head'})"
    of_frozen = bytes_per_chip(frozen)
    of_policy, of_value = (bytes_per_chip(state[part]["params"]) for part in (POLICY, VALUE))
    held = {
        **({} if full else {"policy, frozen weights": of_frozen}),
        f"policy, {trained}": of_policy,
        "reference": of_frozen if full else 0,
        value: of_value,
        "optimiser and sums of gradients": bytes_per_chip((state, arguments[0])) - of_policy - of_value,
    }
    shared = {} if full else {"reference": "the policy's frozen weights"}
    if not own_trunk:
        shared[value] = "the policy's trunk"
    elif not full:
        shared[value] = "the policy's frozen weights"
    trunks = 2 if own_trunk else 1
    look = PlannedProgram(
        make_look(actor, step),
        (state, frozen, streams.batch, extras[0]),
        (1 + trunks) * streams.flops,
        streams.steps,
    )
    update = PlannedProgram(
        accumulate,
        arguments,
        trunks * step_flops(streams.flops, streams.mixing_flops, tuning=settings.tuning),
        streams.steps,
    )
    return held, shared, {"look": look, "update": update}


def _extras(streams: PlannedStreams, shape: BatchShape, mesh: Mesh) -> Extras:
    """Return the shapes of the loss inputs of `prb ppo` for a microbatch."""
    (rows, room), length = streams.batch.reads.shape, shape.response_length
    states = round_up(-(-shape.batch // rows) * shape.responses * (length + 1), READS_STEP)
    places = split_rows(mesh, jnp.int32, rows, states)
    reads = Reads(places, places, split_rows(mesh, jnp.int32, rows, room, length + 1))
    of_tokens, of_states = (split_rows(mesh, jnp.float32, rows, room, size) for size in (length, length + 1))
    tokens: dict[str, Any] = dict.fromkeys(("weights", "counts", "old", "reference", "advantages"), of_tokens)
    read: dict[str, Any] = dict.fromkeys(("value_weights", "values", "returns"), of_states)
    kl = split_rows(mesh, jnp.float32, rows, room)
    return reads, Targets(**tokens, **read, kl=kl)


def _drawing_programs(
    config: DecoderConfig, shape: BatchShape, mesh: Mesh, *, dtype: str, tuning: Tuning
) -> tuple[dict[str, PlannedProgram], int, dict[str, int]]:
    """Return the programs "place" and "draw", the bytes of the caches, and the bytes of held weights per program."""
    kind, split = jnp.dtype(dtype), decoding_mesh(config, mesh)
    draw, caches = sampling_program(config, shape, mesh=split, dtype=dtype)
    programs, given = {"draw": draw}, {"draw": bytes_per_chip(draw.arguments[0])}
    if split != mesh:
        # The split copy of the weights exists beside the held weights only while rollouts are drawn.
        weights = abstract_params(config, dtype=jnp.dtype("float32") if tuning == "full" else kind)
        weights = placed(weights, parameter_shardings(weights, mesh, config=config))
        place = placing_program(make_program(config, mesh=split, dtype=kind), weights)
        programs = {"place": PlannedProgram(place, (weights,), 0.0), **programs}
        given = {"place": bytes_per_chip(weights), "draw": 0}
    return programs, sum(caches), given
