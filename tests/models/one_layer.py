"""A module with arrays of one layer, for tests of the products through its matrices."""

from collections.abc import Mapping

import jax
from flax import nnx

from prb_jax.models.quantization import Narrow, Scales


def layer_of(arrays: Mapping[str, jax.Array]) -> nnx.Module:
    """Return a module with these attributes; the matrix ``q`` is quantised if there are scales ``q_scale``."""
    layer = nnx.Module()
    for name, value in arrays.items():
        if name == "q" and "q_scale" in arrays:
            layer.q = Narrow(value, suffix="_scale")
        else:
            setattr(layer, name, (Scales if name == "q_scale" else nnx.Param)(value))
    return layer
