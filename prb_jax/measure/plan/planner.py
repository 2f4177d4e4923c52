"""Compiles a program for a slice of TPUs and says what it takes; and which mesh and batch size suit a slice."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import jax
from jax.sharding import Mesh

from prb_jax.errors import MeshError, first_line, quote
from prb_jax.measure.plan.chips import Chip, PlanOptions, Slice, slice_of
from prb_jax.measure.plan.costs import Collective, Costs, program_costs
from prb_jax.measure.plan.hlo import parse_module
from prb_jax.measure.plan.program import PlannedProgram, executed_flops, scoring_program, training_program
from prb_jax.measure.plan.streams import BatchShape
from prb_jax.models import REMAT, REMAT_POLICIES
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.named_shapes import read_model
from prb_jax.platform.sharding import crossing_axis, make_mesh, mesh_shape
from prb_jax.training import TUNINGS

Bound = Literal["matrix products", "memory", "links"]

LONG_TOKENS = 8192  # from so many tokens of a tree on, a sweep tries to split them over devices

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one program takes on one slice. Bytes and collectives are those of one chip."""

    fits: bool
    chips: int
    # arguments, results that are not arguments given back, temporaries. Where it does not fit, what the
    # compiler says that it would need.
    peak_bytes_per_chip: int
    argument_bytes_per_chip: int  # weights, batch and, in training, the whole state
    temp_bytes_per_chip: int
    hbm_bytes_per_chip: int
    flops: float  # of a step on all chips, on paper: see :func:`prb_jax.models.flops.stream_flops`
    # of a step, by the roofline of :mod:`prb_jax.measure.plan`; None where it does not fit
    estimated_seconds: float | None
    estimated_mfu: float | None  # ``flops`` over that time and the chips' peak
    # by kind; see :class:`prb_jax.measure.plan.costs.Collective`. Those between slices are called "dcn ..."; the time
    # that they take is not in the estimate.
    collectives: Mapping[str, Collective]
    compile_seconds: float
    mesh: str = ""
    batch: int = 0
    seconds_by: Mapping[Bound, float] = field(default_factory=dict)
    unknown_loops: int = 0  # loops whose trip count could not be read
    # what is missing from the figures, if anything. Where jaxlib is older than libtpu and cannot read its
    # program, those are memory, links and collectives: the sizes hold nevertheless, and the estimate is that
    # of the matrix products alone.
    note: str = ""
    attention: str = ""
    tokens: int = 0  # of the batch, without padding; 0 for a program without one, and so for the following
    computed_tokens: int = 0  # the same with the padding of the streams

    def to_json(self) -> dict[str, Any]:
        """The figures, without what was planned: JSON-ready."""
        hidden = ("mesh", "batch", "seconds_by", "unknown_loops", "note", "attention")
        if not self.tokens:
            hidden += ("tokens", "computed_tokens")
        return {name: value for name, value in asdict(self).items() if name not in hidden}


def plan(model: str | Path | DecoderConfig, options: PlanOptions) -> Plan:
    """Compile scoring, or the forward and backward pass of a training step, for a slice of TPUs.

    Args:
      model: a shape of `prb bench`, a ``config.json``, a folder that holds one, or a configuration. No
        weights are read.
      options: the slice, the program and the batch; two trees for each part that the mesh splits a batch into if
        their number is not given, or the questions of one user where these are more.

    Raises:
      RunError: libtpu is missing.
      MeshError: an unknown topology, or a mesh that does not divide the chips, the model or the batch.
      CheckpointError: a configuration that cannot be used.
    """
    place, config = slice_of(options), read_model(model)
    _check(options)
    devices = make_mesh(options.mesh, devices=place.devices)
    shards, questions = mesh_shape(devices).batch_shards, options.questions_per_user
    rows = options.batch or max(2, questions) * shards
    if rows < questions * shards:
        raise MeshError(
            f"batch: expected at least {questions * shards} trees, {questions} questions of a user "
            f"in each of {shards} streams, found {rows}"
        )
    shape = shape_of(options, batch=rows)
    shared: Any = {"mesh": devices, "dtype": options.dtype, "attention": options.attention}
    if options.train:
        tuning, remat = options.tuning or "full", options.remat or REMAT
        program = training_program(config, shape, tuning=tuning, remat=remat, **shared)
    else:
        program = scoring_program(config, shape, quantize=options.quantize, **shared)
    return compile_program(program, place, mesh=mesh_named(options.mesh, devices), batch=rows)


def sweep(
    model: str | Path | DecoderConfig,
    options: PlanOptions,
    *,
    batches: tuple[int, ...] = (),
    report: Callable[[Plan], None] = lambda plan: None,
) -> tuple[Plan, ...]:
    """Plan every mesh of fsdp x tensor (with tensor up to 8, and whole heads) with every batch size.

    For long trees every one of fsdp x sequence x tensor is tried too; of several slices each has a copy of the model.
    Meshes that do not divide the model or a batch are left out.

    Args:
      model, options: as of :func:`plan`, but for mesh and batch.
      batches: trees of a step; if none are given, those of one, two and four users (of one tree each without
        `questions_per_user`) for each part that the mesh splits a batch into. After one that does not fit, larger ones
        are not tried.
      report: called with each plan as soon as it is there.

    Returns:
      Those that fit, most FLOPs a second first; then the others, smallest peak first.

    Raises:
      As :func:`plan`; MeshError also if no mesh at all divides the model and a batch.
    """
    place, config, slices = slice_of(options), read_model(model), options.slices
    plans: list[Plan] = []
    refused = ""
    chips = len(place.devices) // slices
    long = options.prefix + options.responses * options.response_length >= LONG_TOKENS
    splits = [
        (sequence, tensor)
        for tensor in _divisors(chips)
        for sequence in (_divisors(chips // tensor) if long else (1,))
    ]
    for sequence, tensor in splits:
        shards = len(place.devices) // (sequence * tensor)
        rows = shards * options.questions_per_user
        mesh = f"fsdp={shards // slices}" + (f",sequence={sequence}" if long else "") + f",tensor={tensor}"
        mesh = mesh if slices == 1 else f"data={slices},{mesh}"
        for batch in sorted(batches) or (rows, 2 * rows, 4 * rows):
            try:
                planned = plan(config, replace(options, topology=place, mesh=mesh, batch=batch))
            except MeshError as error:
                refused = refused or str(error)
                continue
            plans.append(planned)
            report(planned)
            if not planned.fits:
                break
    if not plans:
        raise MeshError(f"no mesh of {place.name} can be: {refused}")

    def rank(plan: Plan) -> tuple[bool, float]:
        speed = plan.flops / plan.estimated_seconds if plan.estimated_seconds else 0.0
        return not plan.fits, -speed if plan.fits else plan.peak_bytes_per_chip

    return tuple(sorted(plans, key=rank))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, 9) if number % size == 0]


def shape_of(options: PlanOptions, *, batch: int) -> BatchShape:
    """Return the sizes of a batch of ``batch`` trees."""
    names = (item.name for item in fields(BatchShape) if item.name != "batch")
    return BatchShape(batch=batch, **{name: getattr(options, name) for name in names})


def _check(options: PlanOptions) -> None:
    """Raise MeshError for options that cannot be, or do not go together."""
    for name, known in (("tuning", TUNINGS), ("remat", REMAT_POLICIES)):
        value = getattr(options, name)
        if value not in (None, *known):
            raise MeshError(f"{name}: expected {' or '.join(known)}, found {quote(value)}")
    if options.train and options.quantize is not None:
        raise MeshError(f"quantize: {options.quantize} is for scoring: leave it out in training")
    if options.spread < 0:
        raise MeshError(f"spread: expected 0 or more, found {options.spread}")


def mesh_named(asked: str | None, mesh: Mesh) -> str:
    """Return the sizes of a mesh as `--mesh` takes them."""
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    if crossing := crossing_axis(asked):
        sizes += f",dcn={crossing}"
    return sizes or "fsdp=1"


def roofline(
    chip: Chip, *, chips: int, matmul_flops: float, memory_bytes: float, link_bytes: float
) -> dict[Bound, float]:
    """Return the seconds of each side of the roofline of :mod:`prb_jax.measure.plan`; the largest is the estimate.

    FLOPs are those of all chips together, of int8 counted as half where a chip does twice as many; bytes of one chip.
    """
    return {
        "matrix products": matmul_flops / (chips * chip.bf16_flops),
        "memory": memory_bytes / chip.hbm_bandwidth,
        "links": link_bytes / chip.link_bandwidth,
    }


def compile_program(program: PlannedProgram, place: Slice, *, mesh: str, batch: int) -> Plan:
    """Compile a program with shapes in place of arrays, and say what it takes; mesh and batch are for the plan."""
    chip, chips = place.chip, len(place.devices)
    known: dict[str, Any] = {
        "chips": chips,
        "hbm_bytes_per_chip": chip.hbm_bytes,
        "flops": program.flops,
        "mesh": mesh,
        "batch": batch,
        "attention": program.attention,
        "tokens": program.tokens,
        "computed_tokens": program.computed_tokens,
    }
    traced = program.function.trace(*program.arguments, **program.named)
    lowered = traced.lower()
    start = time.perf_counter()
    try:
        with _nothing_kept():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        arguments = bytes_per_chip((program.arguments, program.named))
        peak = max(needed_bytes(str(error)), arguments)
        return Plan(
            **known,
            fits=False,
            peak_bytes_per_chip=peak,
            argument_bytes_per_chip=arguments,
            temp_bytes_per_chip=peak - arguments,
            estimated_seconds=None,
            estimated_mfu=None,
            collectives={},
            compile_seconds=time.perf_counter() - start,
        )
    seconds = time.perf_counter() - start
    memory = cast(Any, compiled.memory_analysis())
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + max(0, results) + memory.temp_size_in_bytes
    try:
        module, sides = parse_module(compiled.as_text()), get_args(Bound)
        costs = program_costs(module, chips=chips, steps=program.steps)
        loops = costs.unknown_loops
        note = ""
        if loops:
            count = "once" if program.steps == 1 else f"{program.steps:.1f} times, as attention takes steps"
            note = f"{loops} loops of unknown length: their bodies count {count}"
    except jax.errors.JaxRuntimeError as error:
        costs, sides = Costs(), ("matrix products",)
        note = (
            "the estimate is that of matrix products alone, for jaxlib cannot read this program of libtpu's: "
            + first_line(error)
        )
    int8 = chip.bf16_flops / chip.int8_ops
    whole = roofline(
        chip,
        chips=chips,
        matmul_flops=executed_flops(traced.jaxpr, steps=program.steps, int8=int8),
        memory_bytes=costs.memory_bytes + program.kernel_bytes,
        link_bytes=costs.link_bytes,
    )
    by_side: dict[Bound, float] = {side: needed for side, needed in whole.items() if side in sides}
    estimate = max(by_side.values())
    return Plan(
        **known,
        fits=peak <= chip.hbm_bytes,
        peak_bytes_per_chip=peak,
        argument_bytes_per_chip=memory.argument_size_in_bytes,
        temp_bytes_per_chip=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        estimated_seconds=estimate,
        estimated_mfu=program.flops / (estimate * chips * chip.bf16_flops),
        collectives=costs.collectives,
        seconds_by=by_side,
        unknown_loops=costs.unknown_loops,
        note=note,
    )


@contextlib.contextmanager
def _nothing_kept() -> Iterator[None]:
    """Keeps programs out of the persistent compilation cache: without a TPU they could not be read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def needed_bytes(message: str) -> int:
    """What a program would need in all, from the compiler's refusal; 0 where it does not say.

    Some versions write "total memory required for HLO temporaries (20.00G)", which includes arguments,
    others "Used 20.50G of 15.75G hbm".
    """
    match = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT]?)(?:\)| of [\d.]+[KMGT]? hbm)", message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0


def bytes_per_chip(tree: Any) -> int:
    """Return the bytes of a chip's part of all arrays of a tree, which are ``ShapeDtypeStruct`` with shardings."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
