"""Policy, reference, value function and reward model of `prb ppo` on one slice of TPUs: what each holds and runs.

All weights stay on the chips through a whole step. The programs run one after another: what they need beyond the
weights that they are given is not needed by two of them at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.checkpoints.load import abstract_params
from prb_jax.generation.programs import decoding_mesh, make_program, placing_program
from prb_jax.models import REMAT
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.head import LanguageHead
from prb_jax.models.named_shapes import read_model
from prb_jax.plan.chips import describe_slice
from prb_jax.plan.planner import Plan, bytes_per_chip, compile_program
from prb_jax.plan.program import (
    Program,
    batch_of,
    check_shape,
    forward_flops,
    placed,
    scoring_program,
    visited_steps,
)
from prb_jax.plan.sampling import sampling_program
from prb_jax.plan.streams import BatchShape
from prb_jax.rl.forward import Actor
from prb_jax.rl.learner import make_look, make_policy_step, reference_of, sources_of
from prb_jax.rl.objective import POLICY, VALUE, Targets
from prb_jax.rl.sections import RolloutBatchSettings, RolloutSettings, ValueSettings
from prb_jax.rl.settings import PpoSettings
from prb_jax.sharding import batch_sharding, make_mesh, parameter_shardings
from prb_jax.training import PASSES, Tuning

Trunk = Literal["own", "shared"]


@dataclass(frozen=True, kw_only=True)
class PolicyPlan:
    """What training a policy takes on one slice. Bytes are those of one chip.

    Attributes:
      fits: every program finds room beside all that is held.
      mesh, batch: what was planned; batch is the prompts of a microbatch.
      hbm_bytes_per_chip: what a chip has.
      held: weights and states that stay on the chips, by part.
      shared: of a part that holds nothing of its own, what it uses.
      caches: of the rollouts; they are gone when other programs run.
      peaks: of each program, all that is held included.
      programs: as compiled, one microbatch each: "place" (weights are split as drawing needs them; not there where the
        mesh of the plan does so), "draw" (a token of each rollout), "look", "update" and "score".
    """

    fits: bool
    mesh: str
    batch: int
    hbm_bytes_per_chip: int
    held: Mapping[str, int]
    shared: Mapping[str, str]
    caches: int
    peaks: Mapping[str, int]
    programs: Mapping[str, Plan]

    @property
    def peak_bytes_per_chip(self) -> int:
        """Of the whole step."""
        return max(self.peaks.values())

    def to_json(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        programs = {name: plan.to_json() for name, plan in self.programs.items()}
        return {**asdict(self), "peak_bytes_per_chip": self.peak_bytes_per_chip, "programs": programs}


def plan_policy(
    model: str | Path | DecoderConfig,
    *,
    topology: str,
    slices: int = 1,
    mesh: str | None = None,
    reward: str | Path | DecoderConfig | None = None,
    tuning: Literal["lora", "full"] = "lora",
    trunk: Trunk = "own",
    prefix: int = 3840,
    responses: int = 8,
    response_length: int = 128,
    batch: int | None = None,
    dtype: str = "bfloat16",
    remat: str = REMAT,
) -> PolicyPlan:
    """Compile what a step of `prb ppo` with a value function runs, for a slice of TPUs.

    Args:
      model: of the policy: a shape of `prb bench`, a ``config.json``, a folder that holds one, or a configuration.
      topology, slices, mesh, dtype, remat: as of :func:`prb_jax.plan.plan`.
      reward: the reward model on the same mesh, as `model`; None for one elsewhere.
      tuning: of the policy.
      trunk: of the value function.
      prefix, responses, response_length: P of a prompt, K rollouts of it, R tokens of each.
      batch: prompts of a microbatch; one for each part that the mesh splits a batch into if not given.

    Raises:
      RunError: libtpu is missing.
      MeshError: an unknown topology, or a mesh that does not divide the chips, a model or the batch.
      CheckpointError: a configuration that cannot be used.
    """
    place = describe_slice(topology, slices=slices)
    devices = make_mesh(mesh, devices=place.devices)
    parts = devices.shape["data"] * devices.shape["fsdp"]
    shape = BatchShape(
        batch=batch or parts, prefix=prefix, responses=responses, response_length=response_length
    )
    config = _with_language_head(read_model(model))
    check_shape(config, shape, devices)
    settings = PpoSettings(
        tuning=tuning,
        remat=remat,  # pyright: ignore[reportArgumentType] - checked by the settings
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        rollout=RolloutSettings(n=responses, max_new_tokens=response_length),
        batch=RolloutBatchSettings(prompts=shape.batch),
        value=ValueSettings(trunk=trunk),
    )
    held, shared, programs = _policy_programs(config, settings, shape, devices)
    given = {name: sum(held.values()) for name in programs}
    drawing, caches, held_weights = _drawing_programs(config, shape, devices, dtype=dtype, tuning=tuning)
    programs, given = drawing | programs, held_weights | given
    if reward is not None:
        score = scoring_program(read_model(reward), shape, mesh=devices, dtype=dtype)
        held["reward model"] = given["score"] = _bytes(score.arguments[0])
        programs["score"] = score
    sizes = ",".join(f"{name}={size}" for name, size in devices.shape.items() if size > 1) or "fsdp=1"
    plans = {
        name: compile_program(planned, place, mesh=sizes, batch=shape.batch)
        for name, planned in programs.items()
    }
    whole = sum(held.values())
    beside = {name: whole - given[name] for name in plans}
    peaks = {name: planned.peak_bytes_per_chip + beside[name] for name, planned in plans.items()}
    room = place.chip.hbm_bytes
    return PolicyPlan(
        fits=all(plan.fits for plan in plans.values()) and max(peaks.values()) <= room,
        mesh=sizes,
        batch=shape.batch,
        hbm_bytes_per_chip=room,
        held=held,
        shared=shared,
        caches=caches,
        peaks=peaks,
        programs=plans,
    )


def _policy_programs(
    config: DecoderConfig, settings: PpoSettings, shape: BatchShape, mesh: Mesh
) -> tuple[dict[str, int], dict[str, str], dict[str, Program]]:
    """What is held, what is shared, and the programs "look" and "update"."""
    kind, full = jnp.dtype(settings.dtype), settings.tuning == "full"
    actor = Actor(
        config=config,
        mesh=mesh,
        dtype=kind,
        temperature=settings.rollout.temperature,
        lora_scale=1.0 if full else settings.lora.scale,
        remat=settings.remat,
    )
    step = make_policy_step(settings, actor)
    weights = abstract_params(config, dtype=jnp.dtype("float32") if full else kind)
    sources, frozen = jax.eval_shape(lambda params: sources_of(settings, params), weights)
    state = placed(jax.eval_shape(step.init, sources), step.state_shardings)
    frozen = placed(frozen, step.frozen_shardings)
    reference = None
    if full:
        abstract = jax.eval_shape(lambda params: reference_of(params, kind), weights)
        reference = placed(abstract, parameter_shardings(abstract, mesh))
    own_trunk = settings.value.trunk == "own"
    trained, copies = ("weights", "a copy") if full else ("adapters", "adapters")
    value = f"value function ({copies if own_trunk else 'a head'})"
    held = {
        **({} if full else {"policy, frozen weights": _bytes(frozen)}),
        f"policy, {trained}": _bytes(state[POLICY]["params"]),
        "reference": 0 if reference is None else _bytes(reference),
        value: _bytes(state[VALUE]["params"]),
        "optimiser and sums of gradients": _bytes(state)
        - _bytes(state[POLICY]["params"])
        - _bytes(state[VALUE]["params"]),
    }
    shared = {} if full else {"reference": "the policy's frozen weights"}
    if not own_trunk:
        shared[value] = "the policy's trunk"
    elif not full:
        shared[value] = "the policy's frozen weights"
    batch, forward = batch_of(shape, mesh), forward_flops(config, shape)
    visited = visited_steps(config, shape)
    trunks = 2 if own_trunk else 1
    look = Program(
        make_look(settings, actor, step), (state, frozen, reference, batch), (1 + trunks) * forward, visited
    )
    update = Program(
        step.accumulate,
        (state, frozen, batch, _targets(shape, mesh)),
        PASSES[settings.tuning] * trunks * forward,
        visited,
    )
    return held, shared, {"look": look, "update": update}


def _targets(shape: BatchShape, mesh: Mesh) -> Targets:
    count, responses, length = shape.batch, shape.responses, shape.response_length

    def rows(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=batch_sharding(mesh, len(sizes)))

    tokens: dict[str, Any] = dict.fromkeys(
        ("weights", "counts", "old", "reference", "advantages"), rows(count, responses, length)
    )
    states: dict[str, Any] = dict.fromkeys(
        ("value_weights", "values", "returns"), rows(count, responses, length + 1)
    )
    return Targets(**tokens, **states, kl=rows(count))


def _drawing_programs(
    config: DecoderConfig, shape: BatchShape, mesh: Mesh, *, dtype: str, tuning: Tuning
) -> tuple[dict[str, Program], int, dict[str, int]]:
    """The programs "place" and "draw", the bytes of caches, and those of held weights that each program is given."""
    kind, split = jnp.dtype(dtype), decoding_mesh(config, mesh)
    draw, caches = sampling_program(config, shape, mesh=split, dtype=dtype)
    programs, given = {"draw": draw}, {"draw": _bytes(draw.arguments[0])}
    if split != mesh:
        # The copy is beside the weights that are held, and gone when the rollouts are there.
        weights = abstract_params(config, dtype=jnp.dtype("float32") if tuning == "full" else kind)
        weights = placed(weights, parameter_shardings(weights, mesh))
        place = placing_program(make_program(config, mesh=split, dtype=kind), weights)
        programs = {"place": Program(place, (weights,), 0.0, 1.0), **programs}
        given = {"place": _bytes(weights), "draw": 0}
    return programs, sum(caches), given


def _with_language_head(config: DecoderConfig) -> DecoderConfig:
    tied = bool(config.original.get("tie_word_embeddings", False))
    return replace(config, head=LanguageHead(tied, config.final_logit_softcapping))


def _bytes(tree: Any) -> int:
    return sum(map(bytes_per_chip, jax.tree.leaves(tree)))
