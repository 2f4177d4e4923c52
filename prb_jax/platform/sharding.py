"""Meshes and shardings: one table maps logical axes to mesh axes.

Axes of the mesh, always all four: ``data`` (copies of the model), ``fsdp`` (parameters split, gathered
layer by layer), ``sequence`` (the tokens of a stream split, for long profiles) and ``tensor`` (heads, and the mlp or
its experts, split). Streams are dealt over ``data`` and ``fsdp``.

TPU slices are connected by a network (DCN) that is much slower than the links within a slice. One axis crosses it:
``data`` by default, which carries only scores, or in training one gradient sum per microbatch; ``fsdp`` on request,
which carries the parameters of every layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from prb_jax.errors import MeshError, quote

MESH_AXES = ("data", "fsdp", "sequence", "tensor")

Constrain = Callable[[jax.Array, Sequence[str | None]], jax.Array]

# Logical axis -> mesh axes that split it. None: replicated.
RULES: Mapping[str, tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "tokens": ("sequence",),
    "model": ("fsdp", "sequence"),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("tensor",),
    "vocab": ("tensor",),
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes."""

    data: int = 1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return self.data * self.fsdp * self.sequence * self.tensor

    @property
    def batch_shards(self) -> int:
        """Number of parts that a batch of streams is split into."""
        return self.data * self.fsdp


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
            fault = f"unknown axis '{name}': expected {', '.join(MESH_AXES)}"
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


def as_mesh(given: str | Mesh | None) -> Mesh:
    """Return the mesh of a user's choice.

    Args:
      given: sizes of the axes in text, as :func:`make_mesh` takes them; or a mesh. Of a mesh with other axes, as
        another library makes it, the devices are taken.
    """
    if not isinstance(given, Mesh):
        return make_mesh(given)
    return given if given.axis_names == MESH_AXES else make_mesh(devices=given.devices.flatten().tolist())


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


def mesh_shape(mesh: Mesh) -> MeshShape:
    """Return the sizes of a mesh made by :func:`make_mesh`."""
    return MeshShape(**{name: mesh.shape[name] for name in MESH_AXES})


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Translate logical axes by :data:`RULES`."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def sharding_of(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh, *, name: str) -> NamedSharding:
    """Return the sharding of the parameter ``name`` with these logical axes.

    Raises:
        MeshError: a mesh axis does not divide the dimension that it splits.
    """
    for size, axis in zip(shape, axes, strict=True):
        names = (RULES[axis] if axis is not None else None) or ()
        if size % math.prod(mesh.shape[axis_name] for axis_name in names):
            raise MeshError(
                f"mesh axis {shown_axes(mesh, names)} does not divide {size} ({axis} axis of '{name}', "
                f"shape {tuple(shape)})"
            )
    return NamedSharding(mesh, partition_spec(axes))


def check_heads(mesh: Mesh, *, heads: Mapping[str, int]) -> None:
    """Check that every device gets whole heads.

    Args:
        mesh: devices.
        heads: numbers of heads, by the fields of the configuration.

    Raises:
        MeshError: the tensor axis does not divide one of these numbers.
    """
    tensor = mesh.shape["tensor"]
    for name, count in heads.items():
        if count % tensor:
            raise MeshError(f"mesh axis tensor={tensor} does not divide {name}={count}")


def check_tokens(mesh: Mesh, tokens: int) -> None:
    """Check that every device gets the same number of tokens of a stream.

    Raises:
        MeshError: the sequence axis does not divide the tokens.
    """
    if tokens % mesh.shape["sequence"]:
        raise MeshError(
            f"mesh axis sequence={mesh.shape['sequence']} does not divide the {tokens} tokens of a stream, "
            "which was laid out for another mesh"
        )


def shown_axes(mesh: Mesh, names: Sequence[str]) -> str:
    """Return the axes larger than 1 with their sizes, for messages."""
    return " x ".join(f"{name}={mesh.shape[name]}" for name in names if mesh.shape[name] > 1)


def batch_sharding(mesh: Mesh, rank: int) -> NamedSharding:
    """Return a sharding that splits rows over the data and fsdp axes and nothing else."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"], *([None] * (rank - 1))))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return a sharding that copies an array to every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrainer(mesh: Mesh | None) -> Constrain:
    """Return a function of (array, logical axes) that constrains how an activation is split over ``mesh``.

    Without a mesh, or on one device, the function returns its input.
    """
    if mesh is None or mesh.size == 1:
        return lambda x, axes: x

    def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(axes)))

    return constrain


def on_any_mesh(function: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    """Wrap a function for ``mesh``: programs on any other mesh of the same devices may call it.

    If the caller's mesh has explicit axes, its program requires arrays on that mesh, so the result is resharded to it.
    """

    def run(*arguments: Any) -> jax.Array:
        callers = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            result = function(*arguments)
        return jax.sharding.reshard(result, PartitionSpec()) if callers.explicit_axes else result

    return run


def to_global(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Make a global array of rows that this process holds in full: [B, ...]; each device gets its part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
