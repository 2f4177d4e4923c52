"""Low-rank adapters (LoRA) for any matrix of the layers: y = x W + scale * (x A) B.

Factors are attributes of the layers like their matrix: ``q_lora_a`` [L, I, r] and ``q_lora_b`` [L, r, O] for ``q``
[L, I, O], and [L, E, I, r] and [L, E, r, O] for experts. They are ``nnx.LoRAParam`` variables, so filters can select
them. Their metadata contain the matrix (``of``). A starts as normal / sqrt(I) and B as zeros, so an adapted model
initially equals its base.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from prb_jax.errors import CheckpointError
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.layers import PROJECTED, matmul, product, project, sum_over_tokens
from prb_jax.models.lora_config import BOTH, LoraConfig
from prb_jax.models.model import bind
from prb_jax.models.parameter import Declaring, arrays
from prb_jax.models.quantization import FORMS, Narrow, quantise, quantized_project, scale_of

FACTOR_A, FACTOR_B = "_lora_a", "_lora_b"


def adapt(layers: Declaring, config: LoraConfig, *, seed: int = 0) -> None:
    """Add new float32 factors to the matrices of stacked layers.

    A factor does not depend on the choice of other adapted matrices.

    Args:
        layers: Layers of a decoder.
        config: Rank and targets.
        seed: Seed of the A factors.

    Raises:
        CheckpointError: A target is not an adaptable matrix of these layers.
    """
    layers.projection = "adapted"
    targets = config.targets
    if hasattr(layers, BOTH):
        alone = {"gate", "up"} & {*targets}
        if len(alone) == 1:
            raise CheckpointError(
                f"lora.targets: gate and up are one matrix here: expected both, found {alone.pop()}"
            )
        targets = tuple(dict.fromkeys(BOTH if name in ("gate", "up") else name for name in targets))
    for name in targets:
        matrix = getattr(layers, name, None)
        if not isinstance(matrix, nnx.Variable) or not matrix.get_metadata("adaptable"):
            raise CheckpointError(f"lora.targets: layers/{name} is not a matrix that can have an adapter")
        *stack, inputs, outputs = matrix.shape  # axes of layers and experts
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()) & 0x7FFFFFFF)
        a = jax.random.normal(key, (*stack, inputs, config.rank), jnp.float32) * inputs**-0.5
        b = jnp.zeros((*stack, config.rank, outputs), jnp.float32)
        *experts, before, after = matrix.get_metadata("axes")  # the rank axis is small and not sharded
        of: dict[str, Any] = {"of": name, "part": matrix.get_metadata("part")}
        for factor, value, axes in ((FACTOR_A, a, (before, None)), (FACTOR_B, b, (None, after))):
            setattr(layers, f"{name}{factor}", nnx.LoRAParam(value, axes=(*experts, *axes), **of))


def init_lora(layers: Declaring, config: LoraConfig, *, seed: int = 0) -> dict[str, Any]:
    """Adapt stacked layers, and return the factors as a nested dict, e.g. ``{"layers": {"q_lora_a": ...}}``.

    This is a pure function of shapes and seed, so it may run under ``jax.jit`` with output shardings. For arguments
    and errors see :func:`adapt`.
    """
    adapt(layers, config, seed=seed)
    return {"layers": arrays(nnx.state(layers, nnx.LoRAParam))}


def add_arrays(layers: Declaring, names: frozenset[str]) -> None:
    """Same as :func:`prb_jax.models.model.add_beside`, for names that the layers did not declare.

    Raises:
      CheckpointError: A name belongs to no matrix.
    """
    for form in {form.suffix: form for form in FORMS.values()}.values():
        suffix = form.suffix
        matrices = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
        matrices &= vars(layers).keys()  # because one suffix ends with the other
        if matrices:
            quantise(layers, form, names=matrices)
    adapted = tuple(sorted(name.removesuffix(FACTOR_A) for name in names if name.endswith(FACTOR_A)))
    if adapted:
        adapt(layers, LoraConfig(rank=1, targets=adapted))
    if unknown := sorted(names - vars(layers).keys()):
        raise CheckpointError(f"layers/{unknown[0]}: these layers have no such parameter")


def adapted_project(layer: nnx.Module, name: str, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """Apply the matrix ``name`` of a layer, its bias and its adapter to x [..., I]: [..., O] in x's dtype.

    Args:
        layer: Layer with the matrix, quantised or not, and its further arrays.
        name: Name of the matrix.
        x: Input.
        scale: Scale of the adapter's update; see :attr:`LoraConfig.scale`.
    """

    def beside(suffix: str) -> jax.Array | None:
        variable = getattr(layer, f"{name}{suffix}", None)
        return None if variable is None else variable[...]

    weight: jax.Array = getattr(layer, name)[...]
    bias, a, b, scales = beside("_bias"), beside(FACTOR_A), beside(FACTOR_B), scale_of(layer, name)
    merges = a is not None and b is not None and scales is None and _merges(x, weight)
    out: jax.Array
    if scales is not None:
        out = quantized_project(x, weight, scales[0], activations=scales[1])
    else:
        out = _merged_matmul(scale, x, weight, a, b) if merges else matmul(x, weight)
    out = (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)
    if a is not None and b is not None and not merges:
        update = project(checkpoint_name(project(x, a), PROJECTED), b)
        out = (out.astype(jnp.float32) + scale * update.astype(jnp.float32)).astype(x.dtype)
    return checkpoint_name(out, PROJECTED)


def _merges(x: jax.Array, weight: jax.Array) -> bool:
    """Return True if x (W + s A B) is cheaper, i.e. A B needs at most as many products as x A and (x A) B.

    Only in float32: rounding W + s A B to bfloat16 would lose the small updates of training.
    """
    tokens, (inputs, outputs) = math.prod(x.shape[:-1]), weight.shape
    return x.dtype == jnp.float32 and tokens * (inputs + outputs) >= inputs * outputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merged_matmul(scale: float, x: jax.Array, weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return x (W + scale A B) in float32, with as many passes over activations as x W."""
    return product(x, _with_update(weight, a, b, scale))


# Custom derivative: the gradient of W + s A B, a product as large as the forward one, is needed only if W is trained,
# because A and B are narrow.
def _merged_forward(scale: float, x: Any, weight: Any, a: Any, b: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    arrays = tuple(argument.value for argument in (x, weight, a, b))
    return _merged_matmul(scale, *arrays), (*arrays, jnp.zeros(()) if weight.perturbed else None)


def _merged_backward(scale: float, kept: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
    x, weight, a, b, trained = kept
    if isinstance(cotangent, SymbolicZero):
        return None, None, None, None
    to_x = product(cotangent, _with_update(weight, a, b, scale), (-1, 1))
    to_weight = None if trained is None else sum_over_tokens(x, cotangent).astype(weight.dtype)
    through_b, through_a = product(cotangent, b.astype(x.dtype), (-1, 1)), product(x, a.astype(x.dtype))
    to_a, to_b = sum_over_tokens(x, through_b), sum_over_tokens(through_a, cotangent)
    return to_x, to_weight, (scale * to_a).astype(a.dtype), (scale * to_b).astype(b.dtype)


_merged_matmul.defvjp(_merged_forward, _merged_backward, symbolic_zeros=True)


def _with_update(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float | jax.Array) -> jax.Array:
    return weight.astype(jnp.float32) + scale * product(
        a.astype(jnp.float32), b.astype(jnp.float32), (-1, -2), batch=a.ndim - 2
    )


def merge_lora(config: DecoderConfig, params: Mapping[str, Any], *, scale: float) -> dict[str, Any]:
    """Return parameters without adapters: W + scale * A B, computed in float32 and stored in W's dtype.

    Args:
        config: Configuration of the decoder.
        params: Parameters, with adapters or without (then nothing changes).
        scale: Scale of updates; see :attr:`LoraConfig.scale`.

    Raises:
        CheckpointError: An adapted matrix is quantised.
    """
    layers = bind(config, params).layers
    factors = {key: each for key, each in vars(layers).items() if isinstance(each, nnx.LoRAParam)}
    merged = {name: leaf for name, leaf in params["layers"].items() if name not in factors}
    for name in dict.fromkeys(each.get_metadata("of") for each in factors.values()):
        if isinstance(getattr(layers, name), Narrow):
            raise CheckpointError(f"layers/{name}: is quantised: merge its adapter before")
        a, b = (factors[f"{name}{suffix}"][...] for suffix in (FACTOR_A, FACTOR_B))
        merged[name] = _merge(getattr(merged[name], "sharding", None))(merged[name], a, b, scale)
    return {**params, "layers": merged}


@functools.cache
def _merge(sharding: jax.sharding.Sharding | None) -> Callable[..., jax.Array]:
    """Return a function that merges a matrix layer by layer: only one layer's update is in memory in float32."""

    def every(weight: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        def one(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            w, a, b = args
            return _with_update(w, a, b, scale).astype(w.dtype)

        return lax.map(one, (weight, a, b))

    return jax.jit(every, out_shardings=sharding)
