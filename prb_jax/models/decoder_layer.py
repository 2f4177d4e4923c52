"""One decoder layer as a module, and functions shared by all programs that run layers.

For the dimensions see :mod:`prb_jax.models.decoder`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.attention.streams import Attention, take_places
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import ATTENTION, EXPERTS, MLP, RECURRENT, Kind
from prb_jax.models.layers import PROJECTED, gated, project, query_growth, rms_norm, rotary_angles, rotate
from prb_jax.models.parameter import Axes, Declaring, drawn, parameter, places_in_tensor
from prb_jax.platform.sharding import RULES, Constrain
from prb_jax.seams import get

_USES: dict[str, Any] = {"turned": True, "adaptable": True, "quantisable": True}
"""Operations on the matrices of a layer."""


def norm_of(config: DecoderConfig, x: jax.Array, weight: nnx.Variable[jax.Array]) -> jax.Array:
    """Apply the family's root-mean-square norm."""
    kind = {"plus_one": config.norm_plus_one, "scale_after_cast": config.norm_scale_after_cast}
    return rms_norm(x, weight[...], eps=config.rms_norm_eps, **kind)


def norm_weight(config: DecoderConfig, size: int, *, hf: str, dtype: DTypeLike) -> nnx.Param:
    """Declare the weight of a norm, initialised so that the norm does not change the scale."""
    start = jnp.full((size,), 0.0 if config.norm_plus_one else 1.0, dtype)
    return parameter(start, axes=(None,), hf=f"{hf}.weight")


_DENSE = "dense_"
"""Prefix of the matrices of one mlp in a model whose other layers have experts."""

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines of the rotary embedding, float32 [B, T, R / 2], for R rotated channels."""


def angles_of_layers(
    config: DecoderConfig, positions: jax.Array, long: jax.Array | None = None
) -> Callable[[bool, jax.Array | bool], tuple[Angles, Angles]]:
    """Compute the angles for tokens at these positions, int32 [B, T], once for all layers.

    Args:
        config: Architecture.
        positions: Positions in conversations.
        long: True for tokens of conversations beyond :attr:`DecoderConfig.rope_switch`; None for no tokens.

    Returns:
        Function (layer slides, layer rotates) -> angles of its queries and of its keys.
    """
    full, sliding = config.rope
    of_full = rotary_angles(positions, full, long=long)
    of_sliding = of_full if sliding is None else rotary_angles(positions, sliding, long=long)

    def of_layer(slides: bool, rotates: jax.Array | bool) -> tuple[Angles, Angles]:
        cos, sin = of_sliding if slides else of_full
        if not all(config.layer_rotates):
            cos, sin = jnp.where(rotates, cos, 1.0), jnp.where(rotates, sin, 0.0)
        if not full.query_growth:
            return (cos, sin), (cos, sin)
        growth = query_growth(positions, full)[..., None]
        return (cos * growth, sin * growth), (cos, sin)

    return of_layer


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Inputs of a layer besides its activations."""

    query_angles: Angles
    key_angles: Angles
    attend: Attention
    constrain: Constrain
    recur: Callable[..., Any] | None = None
    """Data on earlier tokens for :func:`prb_jax.models.delta_layer.mix`; None for a model without recurrent layers."""
    lora_scale: float = 1.0  # scale of adapter updates
    places: jax.Array | None = (
        None  # [B, K]: tokens at which queries, attention and mlp are computed; None for all
    )
    mesh: Mesh | None = None
    splits_tokens: bool = True  # tokens are sharded over the axis `sequence`, unless `places` selects tokens
    # loads, real: a mixture of experts appends each expert's number of tokens in the mask `real` [B, T] or [B, K]
    loads: list[jax.Array] | None = None
    real: jax.Array | None = None

    @property
    def line(self) -> str | None:
        """Logical axis of the activations' tokens."""
        return "tokens" if self.splits_tokens and self.places is None else None


class DecoderLayer(Declaring):
    """A token mixer and a gated mlp or mixture of experts, each with norms and a residual connection.

    The mixer is softmax attention, or one of the `recurrent layers` of :mod:`prb_jax.seams`. Adapters and scales of
    quantised matrices are further attributes: see :mod:`prb_jax.models.lora` and :mod:`prb_jax.models.quantization`.
    The family of a plug-in may name a subclass with another mlp as its `layer`.
    """

    kind: Kind
    """Parts of this layer, one of `kinds` of the configuration. Stacked layers have the parameters of all parts."""
    # Only in a mixture of experts (:mod:`prb_jax.models.experts`):
    router: nnx.Param[jax.Array]
    router_bias: nnx.Param[jax.Array]
    shared_router: nnx.Param[jax.Array]

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        parts: tuple[str | None, ...] | None = None,
    ) -> None:
        """Declare the parameters of a layer; `parts` selects parts, and None among them the parameters without a
        part."""
        self.config, self.kind = config, config.kinds[0]
        parts = (
            (None, *dict.fromkeys(part for kind in config.kinds for part in kind)) if parts is None else parts
        )
        width, head_dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        norm = functools.partial(norm_weight, config, dtype=dtype)
        linear = functools.partial(self.declare_linear, rngs=rngs, dtype=dtype)
        norms = dict(config.norms)
        if None in parts and "input_norm" in norms:
            self.input_norm = norm(width, hf=norms.pop("input_norm"))
        into: Axes = ("model", "heads")
        if ATTENTION in parts:
            first, biased = {*vars(self)}, config.attention_bias
            if config.attention_gate:
                get("mixed layers", "gated queries").value(self, rngs=rngs, dtype=dtype, uses=_USES)
                linear("self_attn", into, width, biased=biased, k=keys, v=keys)
            else:
                linear("self_attn", into, width, biased=biased, fused="qkv_proj", q=queries, k=keys, v=keys)
            if config.qk_norm:
                by_head = config.qk_norm == "head"
                self.q_norm = norm(head_dim if by_head else queries, hf="self_attn.q_norm")
                self.k_norm = norm(head_dim if by_head else keys, hf="self_attn.k_norm")
            if config.sinks:
                logits = jnp.zeros((config.num_attention_heads,), dtype)
                self.sinks = parameter(logits, axes=("heads",), hf="self_attn.sinks")
            linear("self_attn", into[::-1], queries, biased=config.attention_output_bias, o=width)
            self._set_part(ATTENTION, before=first)
        if RECURRENT in parts:
            get("recurrent layers", "declare").value(
                self, config, rngs=rngs, part=RECURRENT, dtype=dtype, **_USES
            )
        if None in parts:
            for name, hf in norms.items():
                setattr(self, name, norm(width, hf=hf))
        before = {*vars(self)}
        if EXPERTS in parts:
            get("experts", "declare").value(self, config, rngs=rngs, dtype=dtype)
            self._set_part(EXPERTS, before=before)
        before = {*vars(self)}
        if MLP in parts:
            self.declare_mlp(rngs=rngs, dtype=dtype)
            self._set_part(MLP, before=before)
        self.close()

    def _set_part(self, part: str, *, before: Collection[str]) -> None:
        """Assign the parameters that were declared after ``before`` to a part."""
        for name, value in vars(self).items():
            if name not in before:
                value.set_metadata(part=part)

    def declare_linear(
        self,
        module: str,
        axes: Axes,
        inputs: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        biased: bool = False,
        fused: str = "",
        **outputs: int,
    ) -> None:
        """Declare matrices with a common input, which a file stores separately or concatenated in one tensor.

        Args:
            module: Module of a layer in the file, e.g. ``mlp``; the matrix ``up`` is its ``up_proj``.
            axes: Logical axes of inputs and outputs.
            inputs: Number of inputs.
            rngs: Generators for random weights.
            dtype: Dtype of the parameters.
            biased: If True, each matrix has a bias.
            fused: Name of the tensor that contains all matrices, in families that have one.
            outputs: Number of outputs of each matrix by name.
        """
        places = places_in_tensor(outputs) if fused in self.config.fused else {}
        for name, size in outputs.items():
            tensor = fused if places else f"{name.removeprefix(_DENSE)}_proj"
            stored: dict[str, Any] = {"hf": f"{module}.{tensor}.weight", **places.get(name, {})}
            setattr(self, name, drawn(rngs, inputs, size, axes=axes, dtype=dtype, **stored, **_USES))
            if biased:
                zeros, axis = jnp.zeros((size,), dtype), None if axes[1] == "model" else axes[1]
                bias = parameter(zeros, axes=(axis,), hf=f"{module}.{name.removeprefix(_DENSE)}_proj.bias")
                setattr(self, f"{name}_bias", bias)

    def declare_mlp(self, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """Declare the matrices of the mlp; a plug-in's layer may declare others."""
        config = self.config
        kinds: Any = {"rngs": rngs, "dtype": dtype, "biased": config.mlp_bias, "fused": "gate_up_proj"}
        width, mlp = config.hidden_size, config.intermediate_size
        gate, up, down = self.mlp_names
        self.declare_linear("mlp", ("model", "mlp"), width, **{gate: mlp, up: mlp}, **kinds)
        self.declare_linear("mlp", ("mlp", "model"), mlp, **{down: width}, **{**kinds, "fused": ""})

    def run_mlp(self, x: jax.Array, project: Callable[[str, jax.Array], jax.Array]) -> jax.Array:
        """Apply the mlp to x [B, T, D]; the result has the same shape.

        Args:
            x: Input, after its norm.
            project: Function (name of a matrix, input) -> product, with adapter and bias.
        """
        gate, up, down = self.mlp_names
        return project(down, gated(project(gate, x), project(up, x), self.config.hidden_activation))

    @property
    def mlp_names(self) -> tuple[str, str, str]:
        """Names of gate, up and down of a gated mlp; with a prefix where other layers have experts."""
        prefix = "" if self.config.experts is None else _DENSE
        return f"{prefix}gate", f"{prefix}up", f"{prefix}down"

    def project(self, name: str, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        """Apply the matrix ``name`` and its bias to x [..., I]: [..., O] in x's dtype; ``scale`` multiplies the update
        of an adapter."""
        if self.projection:
            return get("projections", self.projection).value(self, name, x, scale=scale)
        bias = getattr(self, f"{name}_bias", None)
        out = project(x, getattr(self, name)[...], None if bias is None else bias[...])
        return checkpoint_name(out, PROJECTED)

    def normed(self, name: str, x: jax.Array) -> jax.Array:
        """Apply the norm ``name`` to x [..., I]; return x unchanged in families without this norm."""
        weight = getattr(self, name, None)
        return x if weight is None else norm_of(self.config, x, weight)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, Any]:
        """Run the layer on x [B, T, D]: [B, T, D], or [B, K, D] at the places of the context.

        Returns:
            The states, and the mixer's data for later tokens; for attention, keys and values [B, T, G, H].
        """
        constrain, places, line = context.constrain, context.places, context.line
        project = functools.partial(self.project, scale=context.lora_scale)
        y = self.normed("input_norm", x)
        attends = ATTENTION in self.kind
        y, kept = (
            self.attend(y, context) if attends else get("recurrent layers", "mix").value(self, y, context)
        )
        if places is not None:
            x = take_places(x, places)
        x = constrain(x + self.normed("post_attention_norm", y), ("batch", line, None))

        y = self.normed("mlp_norm", x)
        if EXPERTS in self.kind:
            y = get("experts", "run").value(self, y, context)
        else:
            y = self.run_mlp(y, project)
        y = self.normed("post_mlp_norm", y)
        return constrain(x + y, ("batch", line, None)), kept

    def attend(self, y: jax.Array, context: LayerContext) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Apply softmax attention to normed y [B, T, D]: [B, T, D], or [B, K, D] at the places of the context; and
        keys and values [B, T, G, H]."""
        config, constrain, places, line = self.config, context.constrain, context.places, context.line
        project = functools.partial(self.project, scale=context.lora_scale)

        def heads_of(name: str, x: jax.Array) -> jax.Array:
            z = project(name, x)
            if config.qk_norm == "width":
                z = self.normed(f"{name}_norm", z)
            z = z.reshape(*z.shape[:2], -1, config.head_dim)
            return self.normed(f"{name}_norm", z) if config.qk_norm == "head" else z

        k, v = heads_of("k", y), heads_of("v", y)
        query_angles = context.query_angles
        if places is not None:
            y = take_places(y, places)
            query_angles = tuple(take_places(angle, places) for angle in query_angles)
        q = heads_of("q", y)
        turn = functools.partial(rotate, interleaved=config.interleaved_rope)
        q, k = turn(q, *query_angles, scale=config.attention_scale), turn(k, *context.key_angles)
        q, k, v = (constrain(z, ("batch", line, "heads", None)) for z in (q, k, v))
        sinks = {"sinks": self.sinks[...]} if config.sinks else {}
        mixed = context.attend(q, k, v, softcap=config.attn_logit_softcapping, **sinks)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        if config.attention_gate:
            gate = jax.nn.sigmoid(project("q_gate", y).astype(jnp.float32))
            mixed = (mixed.astype(jnp.float32) * gate).astype(mixed.dtype)
        return project("o", mixed), (k, v)


def splits_weights(mesh: Mesh | None) -> bool:
    """Return True if matrices are sharded over the axes of the trees or of their tokens."""
    return mesh is not None and math.prod(mesh.shape[name] for name in RULES["model"] or ()) > 1


def gatherer(mesh: Mesh | None) -> Callable[[nnx.State], nnx.State]:
    """Return a function that gathers the sharded weights of a layer on every device; without any it changes nothing."""
    if mesh is None or not splits_weights(mesh):
        return lambda state: state
    return get("rematerialised", "gather").value(mesh)


def rematerialised(body: Callable[..., Any], policy: str, *, gathers: bool, rows: bool) -> Callable[..., Any]:
    """Return a layer body that keeps less for its backward pass: see :mod:`prb_jax.models.rematerialised`."""
    if policy == "none" and not gathers and not rows:
        return body
    return get("rematerialised", "body").value(body, policy, rows=rows)
