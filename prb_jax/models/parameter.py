"""Parameters of the modules: each is declared once, where it is made, with everything that the package must know of it.

The metadata of a declared parameter say how a mesh splits it, which tensor of a Hugging Face checkpoint fills it, and
what may be done with it. Loading, export, sharding, int8 and LoRA read them from the abstract module
(:mod:`prb_jax.models.model`); there is no other table of parameters.
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


ROUTER = "router"
"""The matrix that chooses the experts of a token, which no program rounds: products with it are float32."""


class Declaring(nnx.Module):
    """A module whose parameters are listed in the order in which it declares them.

    `rngs` draws random values and `dtype` is the type of all arrays, both only while the module is made.
    """

    order: tuple[str, ...]
    """Names of parameters and of modules with parameters; set by :meth:`close`."""
    projection: str = ""
    """How matrices are multiplied that are not as they were declared, among the projections of `prb_jax.seams`."""

    def close(self) -> None:
        """End the declarations: flax itself sorts attributes by name."""
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
    mixer: str | None = None,
    pieces: tuple[tuple[int, int], ...] | None = None,
    file_rows: int | None = None,
) -> nnx.Param:
    """Declare a parameter.

    Args:
      value: initial values, without an axis of layers.
      axes: logical axis of each dimension, see :data:`prb_jax.platform.sharding.RULES`.
      hf: name of the tensor in a checkpoint of transformers, after the prefix of the body or of the layer; with
        "{expert}" in it, the file has a tensor for each entry of the first axis, or one of all if it is not `turned`.
      turned: the file holds the last two axes the other way round.
      adaptable: low-rank adapters may be put beside it.
      quantisable: it may be held in eight bits.
      in_body: the name in the file starts with the prefix of the body.
      readout: it is part of the head that gives rewards: float32, and trained with ``tuning="head"``.
      mixer: the way of mixing tokens (`layer_mixers` of the configuration) of the layers that have it; None for all.
      pieces, file_rows: see :class:`prb_jax.models.checkpoints.hf_map.LeafMap`.
    """
    return nnx.Param(
        value, axes=axes, hf=hf, turned=turned, adaptable=adaptable, quantisable=quantisable, in_body=in_body,
        readout=readout, mixer=mixer, pieces=pieces, file_rows=file_rows,
    )  # fmt: skip


def places_in_tensor(outputs: Mapping[str, int], *, groups: int = 1) -> dict[str, dict[str, Any]]:
    """Return where matrices lie in one tensor of a file that holds all of them, as arguments of :func:`parameter`.

    Args:
      outputs: number of outputs of each matrix by its name, in the order of the file.
      groups: the tensor holds so many groups of rows, each with an equal part of every matrix.
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
    """Declare a random normal parameter times ``scale``; of a matrix [inputs, outputs] by default inputs ** -0.5."""
    factor = shape[-2] ** -0.5 if scale is None else scale
    return parameter(factor * jax.random.normal(rngs.params(), shape, dtype), **declared)


class HeadTensors(Declaring):
    """Tensors of a head, as attributes with the names that they have in the file."""

    def __init__(self, tensors: tuple[HeadTensor, ...], *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        for tensor in tensors:
            setattr(self, tensor.name or tensor.key, of_head(tensor, rngs=rngs, dtype=dtype))
        self.close()


def of_head(tensor: HeadTensor, *, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.Param:
    """Declare the parameter that a head names: random if it is a matrix, zeros if not."""
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
