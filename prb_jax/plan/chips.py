"""TPU chips by their public figures, and slices of them as libtpu describes them: no TPU is needed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prb_jax.errors import MeshError, RunError

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What the vendor publishes of one chip.

    Attributes:
      bf16_flops: dense bfloat16 FLOP/s.
      int8_ops: dense int8 operations/s.
      hbm_bytes: memory. The compiler keeps a part of it (0.25 GiB on v5e) for itself.
      hbm_bandwidth: bytes/s.
      link_bandwidth: bytes/s that a chip sends over all its links to other chips together: half of the
        published figure where that counts both directions.
    """

    bf16_flops: float
    int8_ops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(
        bf16_flops=275e12, int8_ops=275e12, hbm_bytes=32 * GIB, hbm_bandwidth=1228e9, link_bandwidth=300e9
    ),
    "v5e": Chip(
        bf16_flops=197e12, int8_ops=394e12, hbm_bytes=16 * GIB, hbm_bandwidth=819e9, link_bandwidth=200e9
    ),
    "v5p": Chip(
        bf16_flops=459e12, int8_ops=918e12, hbm_bytes=95 * GIB, hbm_bandwidth=2765e9, link_bandwidth=600e9
    ),
    "v6e": Chip(
        bf16_flops=918e12, int8_ops=1836e12, hbm_bytes=32 * GIB, hbm_bandwidth=1640e9, link_bandwidth=400e9
    ),
}
"""By generation, as Cloud TPU's documentation has them."""

# libtpu asks the network what machine it is on, complains where it is on none, and lets only one process
# have the TPU: here there is none to have.
_OFFLINE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


@dataclass(frozen=True)
class Slice:
    """Connected chips of one generation; or several equal slices, joined by their hosts' network.

    Attributes:
      name: of one, as in "v5e:4x4".
      chip: their figures.
      devices: what a mesh is made of.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]


def parse_topology(name: str) -> tuple[Chip, int]:
    """The chip and the number of chips of a name such as "v5e:4x4" or "v5p:2x2x4".

    Raises:
      MeshError: a name of another form, or an unknown generation.
    """
    found = re.fullmatch(r"([^:]+):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if found is None or found[1] not in CHIPS:
        raise MeshError(
            f"topology '{name}': expected GENERATION:SHAPE as in v5e:4x4 or v5p:2x2x4, "
            f"with a generation of {', '.join(CHIPS)}"
        )
    return CHIPS[found[1]], math.prod(int(size) for size in found[2].split("x"))


def describe_slice(name: str, *, slices: int = 1) -> Slice:
    """The devices of a slice, or of several equal ones, for compiling only.

    Raises:
      MeshError: a name that cannot be read, no slice, or a shape that libtpu does not know.
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
        message = str(error).strip().split("\n")[0]
        if _without_libtpu(error):
            raise RunError(
                "planning needs libtpu, the compiler for TPUs, which is not installed (no TPU is needed): "
                "pip install 'prb-jax[plan]'"
            ) from error
        raise MeshError(f"topology '{name}': libtpu knows no such slice: {message}") from error
    if len(devices) != chips * slices:
        raise MeshError(
            f"topology '{name}': {chips * slices} chips, but libtpu describes it as {len(devices)} cores, each with "
            "its part of the memory: programs there run on whole chips, so this would say nothing of them"
        )
    return Slice(name, chip, list(devices))


def _without_libtpu(error: Exception) -> bool:
    from importlib.util import find_spec

    return isinstance(error, ImportError) or (
        find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ
    )
