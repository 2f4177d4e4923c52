"""Eight-bit matrices for scoring with frozen weights: y = s_x s_w (x_q W_q).

A quantised matrix remains an attribute of the layers, as a variable of class :class:`Narrow` with another dtype. A
second attribute contains its float32 scales, one per output channel: ``q`` int8 [L, I, O] and ``q_scale`` [L, O]. The
suffix ``_scale`` means that activations are also quantised, with one scale per token, so both factors have eight bits.
``_weight_scale`` means that only the matrix is quantised, and activations keep their dtype. The declaration of a
matrix states whether it can be quantised; embedding, norms, biases, adapters and the head are never quantised.

Quantisation is symmetric and needs no calibration data: scale = largest absolute value / largest number of the dtype.
The error of an int8 weight is at most half a scale. Values of int8 and of float8_e4m3fn are exact in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.layers import product
from prb_jax.models.model import bind
from prb_jax.models.parameter import Declaring, arrays

BOTH_SCALE, WEIGHT_SCALE = "_scale", "_weight_scale"
"""Suffixes of the names of a quantised matrix's scales."""

_INT8, _FP8 = np.dtype(np.int8), np.dtype(jnp.float8_e4m3fn)
_LIMITS = {_INT8: 127.0, _FP8: 448.0}
# A smaller scale would be denormal, and accelerators flush denormals to zero.
_SMALLEST = float(np.finfo(np.float32).tiny)

_Array = TypeVar("_Array", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Form:
    """A format of quantised matrices."""

    name: str  # name given by the user
    dtype: np.dtype  # dtype of the matrices
    activations: bool  # activations are also quantised, so both factors have this dtype

    @property
    def suffix(self) -> str:
        """Suffix of the names of its scales."""
        return BOTH_SCALE if self.activations else WEIGHT_SCALE


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("int8", _INT8, activations=True),
        Form("int8-weights", _INT8, activations=False),
        Form("fp8", _FP8, activations=True),
    )
}


def quantization_form(name: str, *, mesh: Mesh | None = None) -> Form:
    """Return the form of this name.

    Args:
        name: One of :data:`FORMS`.
        mesh: Devices for the computation; without it, any form is accepted.

    Raises:
        CheckpointError: The form is unknown, or the devices have no matrix units for it.
    """
    form = FORMS.get(name)
    if form is None:
        raise CheckpointError(f"quantize: expected {', '.join(FORMS)}, found {quote(name)}")
    if mesh is not None and form.dtype == _FP8 and not _multiplies_fp8(device := mesh.devices.flat[0]):
        raise CheckpointError(
            f"quantize: fp8 needs matrix units for float8_e4m3fn (NVIDIA GPUs of compute capability 8.9 and more, "
            f"TPU v7), found {device.platform} ({device.device_kind}); int8 runs everywhere"
        )
    return form


def _multiplies_fp8(device: Any) -> bool:
    if device.platform == "tpu":
        return "v7" in device.device_kind.lower() or "tpu7" in device.device_kind.lower()
    try:
        return device.platform == "gpu" and float(getattr(device, "compute_capability", "")) >= 8.9
    except ValueError:  # AMD GPUs report an architecture name, and use another 8-bit float
        return False


def quantize_array(x: _Array, dtype: np.dtype, *, axis: int) -> tuple[_Array, _Array]:
    """Return x in ``dtype`` and its scales, float32, reduced over ``axis``; numpy input gives numpy output.

    A row of zeros has scale 1. A row with a non-finite value has a non-finite scale.
    """
    np_or_jnp: Any = np if isinstance(x, np.ndarray) else jnp
    wide = x.astype(np.float32)
    limit = np.float32(_LIMITS[dtype])
    # Multiply by the reciprocal, because compilers do so for division by a constant and hosts would differ.
    scale = np_or_jnp.max(np_or_jnp.abs(wide), axis=axis) * np.float32(1 / limit)
    scale = np_or_jnp.where(scale < np.float32(_SMALLEST), np.float32(1), scale)
    # Rounding of the quotient can exceed the limit, beyond which float8 has only NaN.
    quotient = np_or_jnp.clip(wide / np_or_jnp.expand_dims(scale, axis), -limit, limit)
    if dtype == _INT8:
        quotient = np_or_jnp.rint(quotient)
    return quotient.astype(dtype), scale


def quantized_project(x: jax.Array, weight: jax.Array, scale: jax.Array, *, activations: bool) -> jax.Array:
    """Multiply x [..., I] by a quantised matrix [I, O] with scales [O]: float32 [..., O].

    Args:
        x: Activations.
        weight: Matrix, int8 or float8_e4m3fn.
        scale: Scales, float32.
        activations: If True, also quantise x, with one scale per token; otherwise the product converts the matrix
            exactly to x's dtype.

    Sums of int8 products are exact, in int32, up to 133,000 inputs.
    """
    if not activations:
        return product(x, weight.astype(x.dtype)) * scale
    narrow, token_scale = quantize_array(x, np.dtype(weight.dtype), axis=-1)
    accumulated = jnp.int32 if weight.dtype == _INT8 else jnp.float32
    out = lax.dot_general(
        narrow, weight, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=accumulated
    )
    return out.astype(jnp.float32) * token_scale[..., None] * scale


class Narrow(nnx.Variable):
    """An eight-bit matrix; ``suffix`` is the suffix of the name of its scales."""


class Scales(nnx.Variable):
    """Scales of an eight-bit matrix, one per output channel."""


def scale_of(layer: nnx.Module, name: str) -> tuple[jax.Array, bool] | None:
    """Return the scales of the matrix ``name`` of a layer, and whether activations are also quantised; None if it
    is not quantised."""
    matrix = getattr(layer, name)
    if not isinstance(matrix, Narrow):
        return None
    suffix = matrix.get_metadata("suffix")
    return getattr(layer, f"{name}{suffix}")[...], suffix == BOTH_SCALE


def quantise(layers: Declaring, form: Form, *, names: Collection[str] | None = None) -> None:
    """Replace matrices of stacked layers by quantised matrices with scales; may run under ``jax.jit``.

    Adapters of a matrix are unchanged and apply to the quantised matrix.

    Args:
        layers: Layers of a decoder.
        form: Form of quantisation.
        names: Names of the matrices; by default all quantisable matrices.

    Raises:
        CheckpointError: A matrix is already quantised.
    """
    for name in layers.order:
        matrix = getattr(layers, name)
        if not matrix.get_metadata("quantisable") or (names is not None and name not in names):
            continue
        if isinstance(matrix, Narrow):
            raise CheckpointError(f"layers/{name}: is quantised already")
        # Layer by layer, so only one layer is in memory in float32.
        narrow, scales = lax.map(lambda w: quantize_array(w, form.dtype, axis=-2), matrix[...])
        declared = {key: matrix.get_metadata(key) for key in ("axes", "adaptable", "quantisable", "part")}
        layers.projection = "adapted"
        setattr(layers, name, Narrow(narrow, suffix=form.suffix, **declared))
        *experts, _, outputs = declared["axes"]
        of_scales = {"axes": (*experts, outputs), "part": declared["part"]}
        setattr(layers, f"{name}{form.suffix}", Scales(scales, **of_scales))


def quantize_params(config: DecoderConfig, params: Mapping[str, Any], form: Form) -> Params:
    """Return all arrays of a decoder, with the layers' matrices quantised; for errors see :func:`quantise`."""
    decoder = bind(config, params)
    quantise(decoder.layers, form)
    return {**params, **arrays(decoder)}
