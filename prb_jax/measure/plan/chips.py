"""TPU chips by their public figures, slices as libtpu describes them, and the options of a plan.

No TPU is needed, and JAX is imported only when a slice is described.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from prb_jax.errors import MeshError, RunError, first_line
from prb_jax.models import DTYPES, REMAT_POLICIES
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.options import option, same_option
from prb_jax.training import TUNINGS, Tuning

GIB = 1024**3


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip: dense operations per second, bytes of memory, and bytes per second."""

    bf16_flops: float
    int8_ops: float
    hbm_bytes: int  # the compiler reserves a part (0.25 GiB on v5e)
    hbm_bandwidth: float
    # total that a chip sends over all its links to other chips: half of the published figure if that figure
    # counts both directions
    link_bandwidth: float


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(275e12, 275e12, 32 * GIB, 1228e9, 300e9),
    "v5e": Chip(197e12, 394e12, 16 * GIB, 819e9, 200e9),
    "v5p": Chip(459e12, 918e12, 95 * GIB, 2765e9, 600e9),
    "v6e": Chip(918e12, 1836e12, 32 * GIB, 1640e9, 400e9),
}
"""Chips by generation, from Cloud TPU's documentation."""

# libtpu asks the network for its TPU machine, complains if it finds none, and lets only one process use the
# TPU. A plan uses none.
_OFFLINE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


@dataclass(frozen=True)
class Slice:
    """Connected chips of one generation, e.g. "v5e:4x4", or several equal slices connected by their hosts' network."""

    name: str
    chip: Chip
    devices: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan: a TPU slice, a program, and a batch of B trees: a prefix of P and K responses of R tokens.

    For the sampler and `prb ppo`, trees are prompts with their samples.
    """

    topology: str | Slice  # e.g. "v5e:4x4" or "v5p:2x2x4", or a slice of :func:`describe_slice`
    slices: int = option(1, "Number of such slices, each with a copy of the model", least=1)
    mesh: str | None = option(
        None, "Mesh axes, e.g. fsdp=4,tensor=4 (default: fsdp over all chips of a slice)", "M"
    )
    train: bool = option(False, "Plan the forward and backward pass of a training step")
    value_trunk: Literal["own", "shared"] | None = option(
        None, "Trunk of the value function with --ppo: a copy, or shared with the policy (default: own)"
    )
    tuning: Tuning | None = option(
        None, "Trained weights with --train (default: full) or --ppo (default: lora)", choices=TUNINGS
    )
    remat: str | None = option(
        None,
        "Activations to recompute with --train or --ppo (default: auto, i.e. dots if it fits, else full)",
        choices=REMAT_POLICIES,
    )
    prefix: int = option(3840, "Tokens of the prefix", "P", least=1)
    responses: int = option(2, "Responses per tree", "K", least=1)
    response_length: int = option(128, "Tokens of a response", "R", least=1)
    questions_per_user: int = option(
        1,
        "Consecutive trees with the same profile: the prefix without a question of 40 tokens",
        "Q",
        least=1,
    )
    spread: float = option(
        0.0,
        "Spread of log-normal lengths with medians P and R: S is the standard deviation of the log prefix length, "
        "and responses have half of it; people's profiles have 0.45 (default: 0, all equal)",
        "S",
    )
    batch: int | None = option(
        None, "Trees (default: 2 or Q, whichever is more, per batch shard)", "B", least=1
    )
    quantize: str | None = same_option(LoadOptions, "quantize")
    attention: str = same_option(LoadOptions, "attention")
    dtype: str = option("bfloat16", "type of weights and activations", choices=DTYPES)


def parse_topology(name: str) -> tuple[Chip, int]:
    """Return the chip and the number of chips of a name such as "v5e:4x4" or "v5p:2x2x4".

    Raises:
      MeshError: a name of another form, or an unknown generation.
    """
    match = re.fullmatch(r"([^:]+):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if match is None or match[1] not in CHIPS:
        raise MeshError(
            f"topology '{name}': expected GENERATION:SHAPE, e.g. v5e:4x4 or v5p:2x2x4, "
            f"with a generation of {', '.join(CHIPS)}"
        )
    return CHIPS[match[1]], math.prod(int(size) for size in match[2].split("x"))


def slice_of(options: PlanOptions) -> Slice:
    """Return the slice of a plan; describe it if the options have only its name."""
    if isinstance(options.topology, Slice):
        return options.topology
    return describe_slice(options.topology, slices=options.slices)


def describe_slice(name: str, *, slices: int = 1) -> Slice:
    """Return the devices of a slice, or of several equal slices, for compiling only.

    Raises:
      MeshError: an invalid name, no slice, or a shape unknown to libtpu.
      RunError: libtpu, the compiler for TPUs, is missing.
    """
    if slices < 1:
        raise MeshError(f"slices: expected at least 1, found {slices}")
    chip, chips = parse_topology(name)
    for key, value in _OFFLINE.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    several = {"num_slices": slices} if slices > 1 else {}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices
    except Exception as error:
        lacking = find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ
        if lacking or isinstance(error, ImportError):
            raise RunError(
                "planning needs libtpu, the compiler for TPUs, which is not installed (no TPU is needed): "
                "pip install 'prb-jax[plan]'"
            ) from error
        message = first_line(error)
        raise MeshError(f"topology '{name}': libtpu does not know this slice: {message}") from error
    if len(devices) != chips * slices:
        raise MeshError(
            f"topology '{name}': {chips * slices} chips, but libtpu describes it as {len(devices)} cores, each with "
            "a part of the memory: programs there run on whole chips, so a plan would be wrong"
        )
    return Slice(name, chip, list(devices))
