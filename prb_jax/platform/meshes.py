"""Meshes of devices: sizes of axes in text, TPU slices, and the first collectives of several processes.

TPU slices are connected by a network (DCN) that is much slower than the links within a slice. One axis crosses it:
``data`` by default, which carries only scores, or in training one gradient sum per microbatch; ``fsdp`` on request,
which carries the parameters of every layer.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from prb_jax.errors import MeshError, quote
from prb_jax.platform.sharding import MESH_AXES, MeshShape

CROSSING = ("data", "fsdp")
"""Axes that may cross slices: ``dcn=NAME`` in a mesh's text, ``data`` by default."""


def parse_mesh(text: str | None, *, devices: int, slices: int = 1) -> MeshShape:
    """Parse ``"fsdp=4,tensor=2"``; -1 uses the remaining devices; ``None`` splits parameters over all devices.

    Args:
      text: Sizes of axes; with several slices, also ``dcn=fsdp`` for the axis that crosses them.
      devices: Number of devices.
      slices: Number of slices. With several, ``text=None`` splits parameters within a slice, and each slice has
        a copy.

    Raises:
      MeshError: unknown or repeated axis, bad size, a product that differs from the number of devices, or a crossing
        axis whose size is not a multiple of the number of slices.
    """
    if text is not None and not isinstance(text, str):
        raise MeshError(f"mesh: expected a text such as 'fsdp=4' or a mesh, found {quote(text)}")
    if not text:
        return MeshShape(data=slices, fsdp=devices // slices)
    sizes, crossing = _read_mesh(text)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise MeshError(f"mesh '{text}': only one axis may be -1, found {' and '.join(open_axes)}")
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if devices % known:
            raise MeshError(f"mesh '{text}': {known} does not divide the {devices} devices")
        sizes[open_axes[0]] = devices // known
    shape = MeshShape(**sizes)
    if shape.devices != devices:
        raise MeshError(
            f"mesh '{text}' takes {shape.devices} devices, but {devices} are present: "
            f"write -1 for one axis to use all of them"
        )
    if crossing is not None and slices == 1:
        raise MeshError(
            f"mesh '{text}': dcn={crossing} requires several TPU slices, but these devices are one slice"
        )
    axis = crossing or "data"
    if getattr(shape, axis) % slices:
        remedy = "" if axis == "fsdp" or shape.fsdp % slices else ", or add dcn=fsdp, which is slow"
        raise MeshError(
            f"mesh '{text}': axis {axis}={getattr(shape, axis)} crosses the {slices} slices of "
            f"{devices // slices} devices, so it must be a multiple of {slices}{remedy}"
        )
    return shape


def _read_mesh(text: str) -> tuple[dict[str, int], str | None]:
    """Return sizes by axis (-1: the remaining devices) and the axis of ``dcn=``."""
    texts: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in texts:
            raise MeshError(f"mesh '{text}': axis '{name}' is given twice")
        texts[name], fault = value, ""
        if name == "dcn":
            if value not in CROSSING:
                fault = f"dcn: expected {' or '.join(CROSSING)}, found '{value}'"
        elif name not in MESH_AXES:
            fault = f"unknown axis '{name}': expected {', '.join(MESH_AXES)}, e.g. fsdp=4"
        elif not value.removeprefix("-").isdecimal():
            fault = f"axis '{name}': expected a whole number or -1, found '{value}'"
        elif int(value) < 1 and int(value) != -1:
            fault = (
                f"axis '{name}': expected a size of at least 1, or -1 for what is left, found {int(value)}"
            )
        if fault:
            raise MeshError(f"mesh '{text}': {fault}")
    crossing = texts.pop("dcn", None)
    return {name: int(value) for name, value in texts.items()}, crossing


def crossing_axis(text: str | None) -> str | None:
    """Return the axis that crosses slices if a mesh's text names it, else None."""
    return _read_mesh(text)[1] if text else None


def all_devices() -> list[Any]:
    """Return the devices of all processes.

    Raises:
      MeshError: JAX finds none, usually because ``JAX_PLATFORMS`` names a missing platform.
    """
    try:
        return jax.devices()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error).partition("\n")[0]
        raise MeshError(
            f"JAX finds no device (JAX_PLATFORMS={asked}): {reason}; expected cpu, cuda or tpu"
        ) from error


def make_mesh(text: str | None = None, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh over all devices (or the given ones); see :func:`parse_mesh`.

    With several TPU slices, all axes but one stay within a slice.

    Raises:
      MeshError: see :func:`parse_mesh`; slices of different sizes; no device.
    """
    chosen_devices = list(all_devices() if devices is None else devices)
    by_slice = Counter(
        getattr(device, "slice_index", 0) for device in chosen_devices if device.platform == "tpu"
    )
    slices = max(1, len(by_slice))
    if len(set(by_slice.values())) > 1:
        counts = ", ".join(f"{count} in slice {index}" for index, count in sorted(by_slice.items()))
        raise MeshError(f"mesh: the slices have different numbers of devices: {counts}")
    shape = parse_mesh(text, devices=len(chosen_devices), slices=slices)
    sizes = {name: getattr(shape, name) for name in MESH_AXES}
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    if slices == 1:
        mesh = jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=axis_types, devices=chosen_devices)
        return meet(mesh)
    crossing = crossing_axis(text) or "data"
    outer = {name: slices if name == crossing else 1 for name in MESH_AXES}
    layout = mesh_utils.create_hybrid_device_mesh(
        tuple(sizes[name] // outer[name] for name in MESH_AXES),
        tuple(outer.values()),
        chosen_devices,
        allow_split_physical_axes=True,
    )
    return Mesh(layout, MESH_AXES, axis_types=axis_types)


def mesh_of(given: str | Mesh | None) -> Mesh:
    """Return the mesh of a text, or of the devices of a mesh with other axes, as another library makes it."""
    return (
        make_mesh(devices=given.devices.flatten().tolist()) if isinstance(given, Mesh) else make_mesh(given)
    )


def meet(mesh: Mesh) -> Mesh:
    """Warm up the collectives of CPU processes over every combination of the mesh's axes; return the mesh.

    The first collective of a group waits only 30 seconds for its members, then fails or hangs; later ones have no
    such limit. Without a warm-up the first one follows a compilation, which may delay one process for longer than that.
    """
    devices = mesh.devices.flatten().tolist()
    several = devices[0].platform == "cpu" and jax.distributed.is_initialized()
    if not several or set(devices) != set(all_devices()):
        return mesh
    split = [name for name in MESH_AXES if mesh.shape[name] > 1]
    sharding = NamedSharding(mesh, PartitionSpec(tuple(split)))
    one_each = jax.make_array_from_callback(
        (mesh.size,), sharding, lambda index: np.ones(mesh.size, np.float32)[index]
    )
    for count in range(1, len(split) + 1):
        for axes in itertools.combinations(split, count):
            rest = PartitionSpec(tuple(name for name in split if name not in axes))
            sums = jax.shard_map(
                functools.partial(jax.lax.psum, axis_name=axes),
                mesh=mesh,
                in_specs=sharding.spec,
                out_specs=rest,
            )
            jax.block_until_ready(jax.jit(sums)(one_each))
    return mesh
