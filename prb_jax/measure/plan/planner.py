"""Compile a program for a TPU slice and report its costs; find the mesh and batch size that suit a slice."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

import jax
from jax.sharding import Mesh

from prb_jax.errors import MeshError, first_line, quote
from prb_jax.measure.plan.chips import Chip, PlanOptions, Slice, slice_of
from prb_jax.measure.plan.costs import Collective, Costs, program_costs
from prb_jax.measure.plan.hlo import parse_module
from prb_jax.measure.plan.program import PlannedProgram, executed_flops, scoring_program, training_program
from prb_jax.measure.plan.streams import BatchShape
from prb_jax.models import REMAT_POLICIES, Remat
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.named_shapes import read_model
from prb_jax.platform.meshes import crossing_axis, make_mesh
from prb_jax.platform.sharding import mesh_shape
from prb_jax.training import TUNINGS

Bound = Literal["matrix products", "memory", "links"]


class _Fitting(Protocol):
    @property
    def fits(self) -> bool: ...


Planned = TypeVar("Planned", bound=_Fitting)

LONG_TOKENS = 8192  # tokens of a tree from which a sweep also splits them over devices

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of one program on one slice. Bytes and collectives are for one chip."""

    fits: bool
    chips: int
    # arguments, results that do not reuse arguments, temporaries. If the program does not fit, the compiler's
    # figure for the bytes that it needs.
    peak_bytes_per_chip: int
    argument_bytes_per_chip: int  # weights, batch and, in training, the whole state
    temp_bytes_per_chip: int
    hbm_bytes_per_chip: int
    flops: float  # analytic, of a step on all chips: see :func:`prb_jax.models.flops.stream_flops`
    # of a step, by the roofline of :mod:`prb_jax.measure.plan`; None if the program does not fit
    estimated_seconds: float | None
    estimated_mfu: float | None  # ``flops`` over that time and the chips' peak
    # by kind; see :class:`prb_jax.measure.plan.costs.Collective`. Collectives between slices are named "dcn ...";
    # the estimate does not include their time.
    collectives: Mapping[str, Collective]
    compile_seconds: float
    mesh: str = ""
    batch: int = 0
    seconds_by: Mapping[Bound, float] = field(default_factory=dict)
    unknown_loops: int = 0  # loops without a known trip count
    # figures that are missing, if any. If jaxlib is older than libtpu and cannot read its program, memory, links
    # and collectives are missing: the sizes are still valid, and the estimate covers only the
    # matrix products.
    note: str = ""
    attention: str = ""
    tokens: int = 0  # of the batch, without padding; 0 without a batch, also below
    computed_tokens: int = 0  # with the padding of the streams
    # share of the pairs of an attention kernel that are computed in vain; see
    # :class:`prb_jax.measure.plan.streams.PlannedStreams`
    vain_pairs: float | None = None
    remat: str = ""  # rematerialisation policy of a training step; "" for scoring

    def to_json(self) -> dict[str, Any]:
        """Return the figures without the plan's inputs, JSON-ready."""
        hidden = ("mesh", "batch", "seconds_by", "unknown_loops", "note", "attention")
        if not self.tokens:
            hidden += ("tokens", "computed_tokens", "vain_pairs")
        if not self.remat:
            hidden += ("remat",)
        return {name: value for name, value in asdict(self).items() if name not in hidden}


def plan(model: str | Path | DecoderConfig, options: PlanOptions) -> Plan:
    """Compile scoring, or the forward and backward pass of a training step, for a TPU slice.

    Args:
      model: Shape of `prb bench`, ``config.json``, folder that contains one, or configuration. No
        weights are read.
      options: Slice, program and batch; default: two trees per batch shard of the mesh, or the questions of one
        user if these are more.

    Raises:
      RunError: libtpu is missing.
      MeshError: an unknown topology, or a mesh that does not divide the chips, the model or the batch.
      CheckpointError: the configuration is unsupported.
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
    named: Any = {"mesh": mesh_named(options.mesh, devices), "batch": rows}
    if not options.train:
        program = scoring_program(config, shape, quantize=options.quantize, **shared)
        return compile_program(program, place, **named)

    def of_training(remat: Remat) -> Plan:
        program = training_program(config, shape, tuning=options.tuning or "full", remat=remat, **shared)
        return replace(compile_program(program, place, **named), remat=remat)

    return first_that_fits(of_training, options.remat)


def first_that_fits(planned: Callable[[Remat], Planned], remat: str | None) -> Planned:
    """Return the plan of a training step with this policy; "auto", the default, is `dots` if it fits, else `full`."""
    if remat not in (None, "auto"):
        return planned(cast(Remat, remat))
    with_dots = planned("dots")
    return with_dots if with_dots.fits else planned("full")


def sweep(
    model: str | Path | DecoderConfig,
    options: PlanOptions,
    *,
    batches: tuple[int, ...] = (),
    report: Callable[[Plan], None] = lambda plan: None,
) -> tuple[Plan, ...]:
    """Plan every mesh of fsdp x tensor (with tensor up to 8, and whole heads) with every batch size.

    For long trees every fsdp x sequence x tensor mesh is tried too; with several slices each has a copy of the model.
    Meshes that do not divide the model or a batch are skipped.

    Args:
      model, options: see :func:`plan`; mesh and batch are ignored.
      batches: Trees per step; default: one, two and four users per batch shard of the mesh (with one tree per
        user without `questions_per_user`). After a batch that does not fit, larger ones are not tried.
      report: Called with each finished plan.

    Returns:
      Plans that fit, most FLOPs per second first; then the others, smallest peak first.

    Raises:
      As :func:`plan`; also MeshError if no mesh divides the model and a batch.
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
        raise MeshError(f"no mesh of {place.name} is possible: {refused}")

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
    """Raise MeshError for invalid or incompatible options."""
    for name, known in (("tuning", TUNINGS), ("remat", REMAT_POLICIES)):
        value = getattr(options, name)
        if value not in (None, *known):
            raise MeshError(f"{name}: expected {' or '.join(known)}, found {quote(value)}")
    if options.train and options.quantize is not None:
        raise MeshError(f"quantize: {options.quantize} is only for scoring: remove it for training")
    if options.spread < 0:
        raise MeshError(f"spread: expected 0 or more, found {options.spread}")


def mesh_named(asked: str | None, mesh: Mesh) -> str:
    """Return the sizes of a mesh in the form of `--mesh`."""
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    if crossing := crossing_axis(asked):
        sizes += f",dcn={crossing}"
    return sizes or "fsdp=1"


def roofline(
    chip: Chip, *, chips: int, matmul_flops: float, memory_bytes: float, link_bytes: float
) -> dict[Bound, float]:
    """Return the seconds of each side of the roofline of :mod:`prb_jax.measure.plan`; the largest is the estimate.

    FLOPs are for all chips together, with int8 counted half if a chip is twice as fast at it; bytes are for one chip.
    """
    return {
        "matrix products": matmul_flops / (chips * chip.bf16_flops),
        "memory": memory_bytes / chip.hbm_bandwidth,
        "links": link_bytes / chip.link_bandwidth,
    }


def compile_program(program: PlannedProgram, place: Slice, *, mesh: str, batch: int) -> Plan:
    """Compile a program with shapes in place of arrays, and return its costs; mesh and batch are only recorded."""
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
        "vain_pairs": program.vain_pairs,
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
            count = "once" if program.steps == 1 else f"{program.steps:.1f} times, once per attention step"
            note = f"{loops} loops of unknown length: their bodies count {count}"
    except jax.errors.JaxRuntimeError as error:
        costs, sides = Costs(), ("matrix products",)
        note = (
            "the estimate covers only matrix products, because jaxlib cannot read this program of libtpu: "
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
    """Keep programs out of the persistent compilation cache: without a TPU they cannot be read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def needed_bytes(message: str) -> int:
    """Return the total bytes that a program needs, from the compiler's error; 0 if the error does not contain them.

    Some versions write "total memory required for HLO temporaries (20.00G)", which includes arguments,
    others "Used 20.50G of 15.75G hbm".
    """
    match = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT]?)(?:\)| of [\d.]+[KMGT]? hbm)", message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0


def bytes_per_chip(tree: Any) -> int:
    """Return the bytes of one chip's part of all arrays in a tree of ``ShapeDtypeStruct`` with shardings."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
