"""Meshes and shardings: one table maps logical axes to mesh axes.

Axes of the mesh, always all four: ``data`` (copies of the model), ``fsdp`` (parameters split, gathered
layer by layer), ``sequence`` (the tokens of a stream split, for long profiles) and ``tensor`` (heads, and the mlp or
its experts, split). Streams are dealt over ``data`` and ``fsdp``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prb_jax.errors import MeshError
from prb_jax.seams import get

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


def as_mesh(given: str | Mesh | None) -> Mesh:
    """Return the mesh of a user's choice: a mesh with our axes as it is, or one made of their sizes in text."""
    if isinstance(given, Mesh) and given.axis_names == MESH_AXES:
        return given
    return get("meshes", "make").value(given)


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


def sequence_parts(mesh: Mesh | None) -> int:
    """Return the number of parts into which a mesh splits the queries of a stream."""
    return 1 if mesh is None else mesh.shape["sequence"]


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
