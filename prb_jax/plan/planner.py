"""Compiles a program for a slice of TPUs and says what it takes."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import jax
from jax.sharding import Mesh

from prb_jax.errors import MeshError, quote
from prb_jax.models import REMAT, REMAT_POLICIES
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.named_shapes import read_model
from prb_jax.plan.chips import Chip, Slice, describe_slice
from prb_jax.plan.costs import Collective, Costs, program_costs
from prb_jax.plan.hlo import parse_module
from prb_jax.plan.program import Program, executed_flops, scoring_program, training_program
from prb_jax.plan.streams import BatchShape
from prb_jax.sharding import crossing_axis, make_mesh
from prb_jax.training import TUNINGS, Tuning

Bound = Literal["matrix products", "memory", "links"]

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one program takes on one slice. Bytes and collectives are those of one chip.

    Attributes:
      fits: the compiler finds room for it.
      chips: of the slice.
      peak_bytes_per_chip: arguments, results that are not arguments given back, temporaries. Where it does
        not fit, what the compiler says that it would need.
      argument_bytes_per_chip: weights, batch and, in training, the whole state.
      temp_bytes_per_chip: temporaries.
      hbm_bytes_per_chip: what a chip has.
      flops: of a step on all chips, on paper: see :func:`prb_jax.plan.program.forward_flops`.
      estimated_seconds: of a step, by the roofline of :mod:`prb_jax.plan`; None where it does not fit.
      estimated_mfu: ``flops`` over that time and the chips' peak.
      collectives: by kind; see :class:`prb_jax.plan.costs.Collective`. Those between slices are called "dcn ...";
        the time that they take is not in the estimate.
      compile_seconds: on this machine.
      mesh, batch: what was planned.
      seconds_by: each side of the roofline.
      unknown_loops: loops whose trip count could not be read; their bodies count once.
      note: what is missing from the figures, if anything. Where jaxlib is older than libtpu and cannot read
        its program, those are memory, links and collectives: the sizes hold nevertheless, and the estimate
        is that of the matrix products alone.
      attention: the implementation that the program holds.
      tokens: of the batch, without padding; 0 where trees are not packed, and so for the following.
      computed_tokens: the same with the padding of the streams.
      bucket_tokens: the same where trees are padded to the shapes that suit them best, however long compiling takes.
    """

    fits: bool
    chips: int
    peak_bytes_per_chip: int
    argument_bytes_per_chip: int
    temp_bytes_per_chip: int
    hbm_bytes_per_chip: int
    flops: float
    estimated_seconds: float | None
    estimated_mfu: float | None
    collectives: Mapping[str, Collective]
    compile_seconds: float
    mesh: str = ""
    batch: int = 0
    seconds_by: Mapping[Bound, float] = field(default_factory=dict)
    unknown_loops: int = 0
    note: str = ""
    attention: str = ""
    tokens: int = 0
    computed_tokens: int = 0
    bucket_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """The figures, without what was planned: JSON-ready."""
        hidden = ("mesh", "batch", "seconds_by", "unknown_loops", "note", "attention")
        if not self.tokens:
            hidden += ("tokens", "computed_tokens", "bucket_tokens")
        return {name: value for name, value in asdict(self).items() if name not in hidden}


def plan(
    model: str | Path | DecoderConfig,
    *,
    topology: str | Slice,
    slices: int = 1,
    mesh: str | None = None,
    train: bool = False,
    tuning: Tuning = "full",
    prefix: int = 3840,
    responses: int = 2,
    response_length: int = 128,
    questions_per_user: int = 1,
    spread: float = 0.0,
    batch: int | None = None,
    dtype: str = "bfloat16",
    remat: str = REMAT,
    quantize: str | None = None,
    attention: str = "auto",
) -> Plan:
    """Compiles scoring, or the forward and backward pass of a training step, for a slice of TPUs.

    Args:
      model: a shape of `prb bench`, a ``config.json``, a folder that holds one, or a configuration. No
        weights are read.
      topology: as in "v5e:4x4", or what :func:`prb_jax.plan.chips.describe_slice` gave of it.
      slices: how many such slices, joined by their hosts' network.
      mesh: as in "fsdp=4,tensor=4"; parameters split over all chips of a slice if not given.
      train: training instead of scoring.
      tuning: what is trained: "head", "lora" or "full".
      prefix, responses, response_length: P, K, R of the trees.
      questions_per_user: of scoring with the attention "paged": so many trees in a row begin with the same profile,
        all of the prefix but a question of 40 tokens.
      spread: of training over packed streams: the standard deviation of the logarithm of the prefixes' lengths, of
        which P is the median then; half of it is that of the responses.
      batch: trees; if not given, two for each part that the mesh splits a batch into, or the questions of one user
        where these are more.
      dtype: of activations, and of weights that are not trained.
      remat: what the backward pass computes again: "none", "dots" (the default of training) or "full".
      quantize: of scoring: "int8" or "int8-weights", the layers' matrices in eight bits.
      attention: as of :func:`prb_jax.load`.

    Raises:
      RunError: libtpu is missing.
      MeshError: an unknown topology, or a mesh that does not divide the chips, the model or the batch.
      CheckpointError: a configuration that cannot be used, or an attention that cannot be.
    """
    place = topology if isinstance(topology, Slice) else describe_slice(topology, slices=slices)
    config = read_model(model)
    if tuning not in TUNINGS:
        raise MeshError(f"tuning: expected {' or '.join(TUNINGS)}, found {quote(tuning)}")
    if remat not in REMAT_POLICIES:
        raise MeshError(f"remat: expected {' or '.join(REMAT_POLICIES)}, found {quote(remat)}")
    if train and quantize is not None:
        raise MeshError(f"quantize: {quantize} is for scoring: leave it out in training")
    if train and questions_per_user > 1:
        raise MeshError(f"questions_per_user: {questions_per_user} is for scoring: leave it out in training")
    if spread < 0:
        raise MeshError(f"spread: expected 0 or more, found {spread}")
    if spread and not train:
        raise MeshError(f"spread: {spread} is for training: leave it out in scoring")
    devices = make_mesh(mesh, devices=place.devices)
    shards = devices.shape["data"] * devices.shape["fsdp"]
    rows = batch or max(2, questions_per_user) * shards
    if rows < questions_per_user * shards:
        raise MeshError(
            f"batch: expected at least {questions_per_user * shards} trees, {questions_per_user} questions of a user "
            f"in each of {shards} streams, found {rows}"
        )
    shape = BatchShape(
        batch=rows,
        prefix=prefix,
        responses=responses,
        response_length=response_length,
        questions_per_user=questions_per_user,
        spread=spread,
    )
    options: Any = {"mesh": devices, "dtype": dtype, "attention": attention}
    if train:
        program = training_program(config, shape, tuning=tuning, remat=remat, **options)
    else:
        program = scoring_program(config, shape, quantize=quantize, **options)
    found = compile_program(program, place, mesh=mesh_named(mesh, devices), batch=rows)
    return replace(
        found,
        attention=program.attention,
        tokens=program.tokens,
        computed_tokens=program.computed_tokens,
        bucket_tokens=program.bucket_tokens,
    )


def mesh_named(asked: str | None, mesh: Mesh) -> str:
    """Return the sizes of a mesh as `--mesh` takes them."""
    sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
    if crossing := crossing_axis(asked):
        sizes += f",dcn={crossing}"
    return sizes or "fsdp=1"


def roofline(
    chip: Chip, *, chips: int, matmul_flops: float, memory_bytes: float, link_bytes: float
) -> dict[Bound, float]:
    """Seconds of each side of the roofline of :mod:`prb_jax.plan`; the largest is the estimate.

    Args:
      chip: public figures.
      chips: of the slice.
      matmul_flops: on all chips together, those of int8 counted as half where a chip does twice as many.
      memory_bytes, link_bytes: of one chip.
    """
    return {
        "matrix products": matmul_flops / (chips * chip.bf16_flops),
        "memory": memory_bytes / chip.hbm_bandwidth,
        "links": link_bytes / chip.link_bandwidth,
    }


def compile_program(program: Program, place: Slice, *, mesh: str, batch: int) -> Plan:
    """Compile a program for a slice, and say what it takes.

    Args:
      program: with shapes in place of arrays.
      place: the slice.
      mesh, batch: what is planned, for the plan.
    """
    chips = len(place.devices)
    fields: dict[str, Any] = {
        "chips": chips,
        "hbm_bytes_per_chip": place.chip.hbm_bytes,
        "flops": program.flops,
        "mesh": mesh,
        "batch": batch,
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
        arguments = sum(bytes_per_chip(leaf) for leaf in jax.tree.leaves((program.arguments, program.named)))
        peak = max(needed_bytes(str(error)), arguments)
        return Plan(
            **fields,
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
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        costs, known = Costs(), ("matrix products",)
        note = (
            "the estimate is that of matrix products alone, for jaxlib cannot read this program of libtpu's: "
            + str(error).strip().splitlines()[0]
        )
    else:
        costs, known = program_costs(parse_module(text), chips=chips), get_args(Bound)
        loops = costs.unknown_loops
        note = f"{loops} loops of unknown length: their bodies count once" if loops else ""
    whole = roofline(
        place.chip,
        chips=chips,
        matmul_flops=executed_flops(
            traced.jaxpr, visited=program.visited, int8=place.chip.bf16_flops / place.chip.int8_ops
        ),
        memory_bytes=costs.memory_bytes + program.kernel_bytes,
        link_bytes=costs.link_bytes,
    )
    sides: dict[Bound, float] = {side: seconds for side, seconds in whole.items() if side in known}
    estimate = max(sides.values())
    return Plan(
        **fields,
        fits=peak <= place.chip.hbm_bytes,
        peak_bytes_per_chip=peak,
        argument_bytes_per_chip=memory.argument_size_in_bytes,
        temp_bytes_per_chip=memory.temp_size_in_bytes,
        compile_seconds=seconds,
        estimated_seconds=estimate,
        estimated_mfu=program.flops / (estimate * chips * place.chip.bf16_flops),
        collectives=costs.collectives,
        seconds_by=sides,
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
    found = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT]?)(?:\)| of [\d.]+[KMGT]? hbm)", message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def bytes_per_chip(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of a chip's part of an array."""
    sharding = cast(jax.sharding.NamedSharding, leaf.sharding)
    size = leaf.dtype.itemsize
    for part in sharding.shard_shape(leaf.shape):
        size *= part
    return size
