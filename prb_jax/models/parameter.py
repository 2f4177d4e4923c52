"""Parameters of modules: each is declared once, with all information that the package needs.

The metadata of a parameter contain its sharding, its tensor in a Hugging Face checkpoint, and the allowed operations.
Loading, export, sharding, int8 and LoRA read them from the abstract module (:mod:`prb_jax.models.model`), the only
table of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from prb_jax.models.head import HeadTensor

Path = tuple[str, ...]
Axes = tuple[str | None, ...]


class Declaring(nnx.Module):
    """A module that lists its parameters in the order of declaration.

    `rngs` draws random values and `dtype` is the dtype of all arrays; both are used only during construction.
    """

    order: tuple[str, ...]
    """Names of parameters and of submodules with parameters; set by :meth:`close`."""
    projection: str = ""
    """Projection, registered in `prb_jax.seams`, for matrices that were quantised or adapted after declaration."""

    def close(self) -> None:
        """End the declarations and store their order, because flax sorts attributes by name."""
        held = nnx.Variable | nnx.Module
        self.order = tuple(name for name, value in vars(self).items() if isinstance(value, held))


def parameter(
    value: jax.Array,
    *,
    axes: Axes,
    hf: str,
    turned: bool = False,
    adaptable: bool = False,
    quantisable: bool = False,
    in_body: bool = True,
    readout: bool = False,
    part: str | None = None,
    pieces: tuple[tuple[int, int], ...] | None = None,
    file_rows: int | None = None,
) -> nnx.Param:
    """Declare a parameter.

    Args:
      value: Initial values, without an axis of layers.
      axes: Logical axis of each dimension; see :data:`prb_jax.platform.sharding.RULES`.
      hf: Name of the tensor in a checkpoint of transformers, without the prefix of the body or layer. If it contains
        "{expert}", the file has one tensor per entry of the first axis, or a single tensor if it is not `turned`.
      turned: If True, the file stores the last two axes transposed.
      adaptable: If True, the parameter can have low-rank adapters.
      quantisable: If True, the parameter may be stored in eight bits.
      in_body: If True, the name in the file starts with the prefix of the body.
      readout: If True, the parameter belongs to the reward head: float32, and trained with ``tuning="head"``.
      part: Part of the layers with this parameter (see `kinds` of the configuration); None for all layers.
      pieces, file_rows: Rows in the file; see :class:`prb_jax.models.checkpoints.hf_map.LeafMap`.
    """
    return nnx.Param(
        value, axes=axes, hf=hf, turned=turned, adaptable=adaptable, quantisable=quantisable, in_body=in_body,
        readout=readout, part=part, pieces=pieces, file_rows=file_rows,
    )  # fmt: skip


def places_in_tensor(outputs: Mapping[str, int], *, groups: int = 1) -> dict[str, dict[str, Any]]:
    """Return the locations of matrices in a fused tensor of a file, as arguments of :func:`parameter`.

    Args:
      outputs: Number of outputs of each matrix by name, in file order.
      groups: Number of row groups in the tensor, each with an equal part of every matrix.
    """
    total, start = sum(outputs.values()), 0
    found: dict[str, dict[str, Any]] = {}
    for name, size in outputs.items():
        firsts = range(start // groups, total, total // groups)
        found[name] = {
            "pieces": tuple((first, first + size // groups) for first in firsts),
            "file_rows": total,
        }
        start += size
    return found


def drawn(
    rngs: nnx.Rngs, *shape: int, dtype: DTypeLike, scale: float | None = None, **declared: Any
) -> nnx.Param:
    """Declare a random normal parameter times ``scale``; default inputs ** -0.5 for a matrix [inputs, outputs]."""
    factor = shape[-2] ** -0.5 if scale is None else scale
    return parameter(factor * jax.random.normal(rngs.params(), shape, dtype), **declared)


class HeadTensors(Declaring):
    """Tensors of a head, as attributes with their names in the file."""

    def __init__(self, tensors: tuple[HeadTensor, ...], *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        for tensor in tensors:
            setattr(self, tensor.name or tensor.key, of_head(tensor, rngs=rngs, dtype=dtype))
        self.close()


def of_head(tensor: HeadTensor, *, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.Param:
    """Declare a parameter of a head: random for a matrix, zeros otherwise."""
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    declared: dict[str, Any] = {
        "axes": tensor.axes or (None,) * len(shape),
        "hf": tensor.key,
        "turned": tensor.transposed,
        "in_body": False,
        "readout": tensor.readout,
        "pieces": tensor.pieces,
        "file_rows": tensor.file_rows,
    }
    if len(shape) == 2:
        return drawn(rngs, *shape, dtype=dtype, **declared)
    return parameter(jnp.zeros(shape, dtype), **declared)


def parameters(module: Declaring) -> Iterator[tuple[Path, nnx.Variable[Any]]]:
    """Yield path and variable of every declared parameter, in the order of declaration."""
    for name in module.order:
        value = getattr(module, name)
        if isinstance(value, nnx.Variable):
            yield (name,), value
        else:
            yield from (((name, *path), variable) for path, variable in parameters(value))


def arrays(module: nnx.Module | nnx.State) -> dict[str, Any]:
    """Return the arrays of a module, or of its state, as a nested dict."""
    return nnx.to_pure_dict(module if isinstance(module, nnx.State) else nnx.state(module))
