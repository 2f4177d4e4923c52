"""What a loaded checkpoint is held in: shape and dtype of every array, before anything is read."""

import math
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from prb_jax.checkpoints.hf_map import LeafMap
from prb_jax.checkpoints.quantized import is_matrix, scale_path
from prb_jax.errors import CheckpointError
from prb_jax.models.quantization import Form

Shapes = Mapping[tuple[str, ...], tuple[tuple[int, ...], np.dtype]]


def leaf_shapes(
    leaves: Iterable[LeafMap], *, dtype: DTypeLike, head_dtype: DTypeLike | None, form: Form | None
) -> Shapes:
    """Shape and dtype of every array, by its path: of the leaves, and of the scales of quantised ones.

    Raises:
      CheckpointError: a dtype that holds no weights.
    """
    shapes: dict[tuple[str, ...], tuple[tuple[int, ...], np.dtype]] = {}
    for leaf in leaves:
        shapes[leaf.path] = (leaf.shape, _dtype_of(leaf, dtype, head_dtype))
        if form is not None and is_matrix(leaf):
            shapes[leaf.path] = (leaf.shape, form.dtype)
            shapes[scale_path(leaf, form)] = ((leaf.shape[0], leaf.shape[2]), np.dtype(np.float32))
    return shapes


def total_bytes(shapes: Shapes) -> int:
    """Of all arrays together."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def _dtype_of(leaf: LeafMap, dtype: DTypeLike, head_dtype: DTypeLike | None) -> np.dtype:
    chosen = jnp.dtype(head_dtype if head_dtype is not None and leaf.is_head else dtype)
    if not jnp.issubdtype(chosen, jnp.floating):
        raise CheckpointError(f"weights cannot be loaded as {chosen}: expected a floating-point dtype")
    return chosen
