"""Matrices in eight bits, for scoring with frozen weights: y = s_x s_w (x_q W_q).

A quantised matrix keeps its place in the layers as a variable of the kind :class:`Narrow`, in another dtype, and its
float32 scales lie beside it, one for each output channel: ``q`` int8 [L, I, O] and ``q_scale`` [L, O]. ``_scale`` means
that activations are quantised too, a scale for each token, so that the product is one of eight-bit factors;
``_weight_scale`` means that the matrix alone is, and the product is one of activations in their own dtype. Which
matrices can be quantised is said where they are declared; embedding, norms, biases, adapters and the head stay as they
are.

Symmetric, without calibration data: scale = largest absolute value / largest number of the dtype, so a
weight is off by half a scale at most in int8. Values of int8 and of float8_e4m3fn are exact in bfloat16.
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
"""What the names of a quantised matrix's scales end with."""

_INT8, _FP8 = np.dtype(np.int8), np.dtype(jnp.float8_e4m3fn)
_LIMITS = {_INT8: 127.0, _FP8: 448.0}
# A smaller scale would be a denormal number, which accelerators take for zero.
_SMALLEST = float(np.finfo(np.float32).tiny)

_Array = TypeVar("_Array", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Form:
    """How matrices are quantised."""

    name: str  # as given by the user
    dtype: np.dtype  # of the matrices
    activations: bool  # activations are quantised too, so that both factors are of this dtype

    @property
    def suffix(self) -> str:
        """What the names of its scales end with."""
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
    """The form of this name.

    Args:
        name: one of :data:`FORMS`.
        mesh: the devices that are to run it; anything goes if not given.

    Raises:
        CheckpointError: an unknown form, or these devices have no matrix units for it.
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
    except ValueError:  # AMD's GPUs are named by an architecture, and know another 8-bit float
        return False


def quantize_array(x: _Array, dtype: np.dtype, *, axis: int) -> tuple[_Array, _Array]:
    """x in ``dtype`` and its scales, float32, with ``axis`` reduced away; numpy in, numpy out.

    A row of zeros has scale 1. The scale of a row with a value that is not finite is not finite either.
    """
    np_or_jnp: Any = np if isinstance(x, np.ndarray) else jnp
    wide = x.astype(np.float32)
    limit = np.float32(_LIMITS[dtype])
    # Times the reciprocal: compilers make that of a quotient by a constant, and hosts would differ.
    scale = np_or_jnp.max(np_or_jnp.abs(wide), axis=axis) * np.float32(1 / limit)
    scale = np_or_jnp.where(scale < np.float32(_SMALLEST), np.float32(1), scale)
    # Rounding of the quotient can step over the limit, where float8 has nothing but NaN.
    quotient = np_or_jnp.clip(wide / np_or_jnp.expand_dims(scale, axis), -limit, limit)
    if dtype == _INT8:
        quotient = np_or_jnp.rint(quotient)
    return quotient.astype(dtype), scale


def quantized_project(x: jax.Array, weight: jax.Array, scale: jax.Array, *, activations: bool) -> jax.Array:
    """x [..., I] through a quantised matrix [I, O] with scales [O]: float32 [..., O].

    Args:
        x: activations.
        weight: int8 or float8_e4m3fn.
        scale: float32.
        activations: quantise x too, with a scale for each token; otherwise the matrix is widened to x's
            dtype, exactly, within the product.

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
    """A matrix in eight bits; ``suffix`` is what the name of its scales ends with."""


class Scales(nnx.Variable):
    """The scales of a matrix in eight bits, one for each output channel."""


def scale_of(layer: nnx.Module, name: str) -> tuple[jax.Array, bool] | None:
    """The scales of the matrix ``name`` of a layer, and whether activations are quantised too; None if it
    is not quantised."""
    matrix = getattr(layer, name)
    if not isinstance(matrix, Narrow):
        return None
    suffix = matrix.get_metadata("suffix")
    return getattr(layer, f"{name}{suffix}")[...], suffix == BOTH_SCALE


def quantise(layers: Declaring, form: Form, *, names: Collection[str] | None = None) -> None:
    """Replace matrices of stacked layers by quantised ones with their scales. It may run under ``jax.jit``.

    Adapters beside a matrix stay as they are, and work on top of it.

    Args:
        layers: of a decoder.
        form: how.
        names: of the matrices; all that can be if not given.

    Raises:
        CheckpointError: one is quantised already.
    """
    for name in layers.order:
        matrix = getattr(layers, name)
        if not matrix.get_metadata("quantisable") or (names is not None and name not in names):
            continue
        if isinstance(matrix, Narrow):
            raise CheckpointError(f"layers/{name}: is quantised already")
        # A layer at a time: only one layer is ever in memory in float32.
        narrow, scales = lax.map(lambda w: quantize_array(w, form.dtype, axis=-2), matrix[...])
        declared = {key: matrix.get_metadata(key) for key in ("axes", "adaptable", "quantisable", "mixer")}
        layers.projection = "adapted"
        setattr(layers, name, Narrow(narrow, suffix=form.suffix, **declared))
        *experts, _, outputs = declared["axes"]
        of_scales = {"axes": (*experts, outputs), "mixer": declared["mixer"]}
        setattr(layers, f"{name}{form.suffix}", Scales(scales, **of_scales))


def quantize_params(config: DecoderConfig, params: Mapping[str, Any], form: Form) -> Params:
    """Return all arrays of a decoder, the layers' matrices quantised; errors are those of :func:`quantise`."""
    decoder = bind(config, params)
    quantise(decoder.layers, form)
    return {**params, **arrays(decoder)}
