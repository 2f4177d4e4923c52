"""The mlp of a layer as a mixture of experts: every token uses a few of many experts, and no token is dropped.

The router's softmax and the choice of experts are float32. Rows of tokens are sorted by expert, so the rows of an
expert are contiguous and the products with all experts' matrices are one call (:mod:`prb_jax.models.grouped`). The
mesh axis ``tensor`` distributes the experts: each device computes the rows of its experts, and results are summed
over the axis.

Dimensions: T tokens, E experts, k experts per token, R rows; I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.experts import Experts
from prb_jax.models.decoder_layer import DecoderLayer, LayerContext
from prb_jax.models.grouped import Groups, combined, group_rows, grouped_product, spread
from prb_jax.models.layers import PROJECTED, gated, product
from prb_jax.models.lora import FACTOR_A, FACTOR_B
from prb_jax.models.parameter import drawn, parameter
from prb_jax.models.quantization import BOTH_SCALE, WEIGHT_SCALE, quantize_array
from prb_jax.platform.sharding import RULES

_BESIDE = ("", "_bias", FACTOR_A, FACTOR_B, BOTH_SCALE, WEIGHT_SCALE)
"""Suffixes of the arrays that belong to a matrix of all experts."""


def declare_experts(layer: DecoderLayer, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
    """Declare the router and the matrices of all experts, including a shared expert, as attributes of a layer."""
    experts, width = config.experts, config.hidden_size
    assert experts is not None
    names: Any = experts.names
    count, size = experts.count, experts.size
    uses: Any = {"adaptable": True, "quantisable": True, "dtype": dtype}
    layer.router = drawn(
        rngs, width, count, axes=("model", None), hf=f"{names.router}.weight", turned=True, dtype=dtype
    )
    both = (("gate", size), ("up", size)) if not names.gate_up else (("gate_up", 2 * size),)
    for name, inputs, outputs, axes in (
        *((name, width, outputs, ("model", None)) for name, outputs in both), ("down", size, width, (None, "model")),
    ):  # fmt: skip
        # A tensor of all experts has no ".weight" suffix and is not transposed.
        key, turned = getattr(names, name), not names.gate_up
        key = f"{key}.weight" if turned else key
        shape, axes = (count, inputs, outputs), ("experts", *axes)
        setattr(layer, name, drawn(rngs, *shape, axes=axes, hf=key, turned=turned, **uses))
        if names.biased:
            key = f"{key.replace('.{expert}', '')}_bias"
            bias = parameter(jnp.zeros((count, outputs), dtype), axes=("experts", axes[2]), hf=key)
            setattr(layer, f"{name}_bias", bias)
    if names.biased:
        layer.router_bias = parameter(jnp.zeros((count,), dtype), axes=(None,), hf=f"{names.router}.bias")
    uses["turned"] = True
    if not experts.shared:
        return
    into, back = (width, experts.shared), (experts.shared, width)
    for name, shape, axes in (
        ("gate", into, ("model", "mlp")), ("up", into, ("model", "mlp")), ("down", back, ("mlp", "model")),
    ):  # fmt: skip
        key = f"mlp.shared_expert.{name}_proj.weight"
        setattr(layer, f"shared_{name}", drawn(rngs, *shape, axes=axes, hf=key, **uses))
    layer.shared_router = drawn(
        rngs, width, 1, axes=("model", None), hf="mlp.shared_expert_gate.weight", turned=True, dtype=dtype
    )


def run_experts(layer: DecoderLayer, x: jax.Array, context: LayerContext) -> jax.Array:
    """Apply a layer's mixture of experts to x [B, T, D]; the result has x's dtype.

    If the context counts loads, append the number of real tokens of each expert, float32 [E].
    """
    config, mesh, line = layer.config, context.mesh, context.line
    experts = config.experts
    assert experts is not None
    bias = layer.router_bias[...] if experts.names.biased else None
    weights, chosen = _route(x, layer.router[...], bias, experts)
    if context.loads is not None:
        assert context.real is not None
        real = jnp.broadcast_to(context.real[..., None], chosen.shape).astype(jnp.float32)
        loads = jnp.zeros(experts.count).at[chosen].add(real)
        context.loads.append(lax.stop_gradient(loads))
    into = ("gate_up",) if experts.names.gate_up else ("gate", "up")
    held = {name: _held(layer, name) for name in (*into, "down")}
    several = mesh is not None and mesh.size > 1
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform

    def part(x: jax.Array, weights: jax.Array, chosen: jax.Array, held: Any) -> jax.Array:
        count = held["down"][""].shape[0]
        first = lax.axis_index("tensor") * count if several else 0
        flat = x.reshape(-1, x.shape[-1])
        groups = group_rows(
            chosen.reshape(len(flat), -1) - first, count, of=experts.count, loops=platform == "cpu"
        )

        def through(name: str, rows: jax.Array) -> jax.Array:
            return _project(held[name], rows, groups, scale=context.lora_scale)

        rows = spread(flat, groups)
        if experts.names.gate_up:
            hidden = through("gate_up", rows)
            gate, up = hidden[:, ::2], hidden[:, 1::2]
        else:
            gate, up = through("gate", rows), through("up", rows)
        if experts.limit is None:
            hidden = gated(gate, up, config.hidden_activation)
        else:
            hidden = _clamped(gate, up, limit=experts.limit, alpha=experts.alpha)
        rows = through("down", hidden)
        out = combined(rows, weights.reshape(len(flat), -1), groups)
        return (lax.psum(out, "tensor") if several else out).astype(x.dtype).reshape(x.shape)

    if several:
        tokens = PartitionSpec(RULES["batch"], None if line is None else RULES[line])
        of_experts = jax.tree.map(lambda _: PartitionSpec(RULES["experts"]), held)
        part = jax.shard_map(
            part, mesh=mesh, in_specs=(tokens, tokens, tokens, of_experts), out_specs=tokens, check_vma=False
        )
    out = part(x, weights, chosen, held)
    if not experts.shared:
        return out
    gate, up = (layer.project(f"shared_{name}", x, scale=context.lora_scale) for name in ("gate", "up"))
    hidden = gated(gate, up, config.hidden_activation)
    shared = layer.project("shared_down", hidden, scale=context.lora_scale)
    share = jax.nn.sigmoid(product(x, layer.shared_router[...].astype(x.dtype)))
    return (out.astype(jnp.float32) + share * shared.astype(jnp.float32)).astype(x.dtype)


def _route(
    x: jax.Array, router: jax.Array, bias: jax.Array | None, experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """Return weights float32 and indices int32 [..., k] of the experts for each token of x [..., D]."""
    logits = product(x.astype(jnp.float32), router.astype(jnp.float32))
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    weights, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), experts.chosen)
    if experts.normalised:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, chosen


def _clamped(gate: jax.Array, up: jax.Array, *, limit: float, alpha: float) -> jax.Array:
    """Return (up + 1) gate sigmoid(alpha gate) of clamped values, computed in float32, in gate's dtype."""
    wide = jnp.minimum(gate.astype(jnp.float32), limit)
    return (
        (jnp.clip(up.astype(jnp.float32), -limit, limit) + 1) * wide * jax.nn.sigmoid(alpha * wide)
    ).astype(gate.dtype)


def _held(layer: DecoderLayer, name: str) -> dict[str, jax.Array]:
    """Return the experts' matrices of this name and their further arrays, by suffix."""
    found = {end: getattr(layer, f"{name}{end}", None) for end in _BESIDE}
    return {end: variable[...] for end, variable in found.items() if variable is not None}


def _project(held: Mapping[str, jax.Array], rows: jax.Array, groups: Groups, *, scale: float) -> jax.Array:
    """Apply the experts' matrices, with adapters or scales, to rows [R, I]: [R, O] in the dtype of rows."""
    weight, scales = held[""], held.get(BOTH_SCALE, held.get(WEIGHT_SCALE))
    if scales is None:
        out = grouped_product(rows, weight, groups)
    elif BOTH_SCALE in held:
        narrow, of_rows = quantize_array(rows, np.dtype(weight.dtype), axis=-1)
        out = grouped_product(narrow, weight, groups) * of_rows[:, None] * scales[groups.owners]
    else:
        out = grouped_product(rows, weight, groups) * scales[groups.owners]
    if "_bias" in held:
        out = out + held["_bias"].astype(jnp.float32)[groups.owners]
    if FACTOR_A in held:
        inner = checkpoint_name(grouped_product(rows, held[FACTOR_A], groups).astype(rows.dtype), PROJECTED)
        out = out + scale * grouped_product(inner, held[FACTOR_B], groups)
    return checkpoint_name(out.astype(rows.dtype), PROJECTED)
