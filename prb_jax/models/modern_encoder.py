"""Layers of ModernBERT (Warner et al., 2024, arXiv 2412.13663): norms before each block, and a gated mlp.

Some layers attend to all tokens, the others only to near tokens on both sides, each with its own rotary embedding. The
first layer has no norm before attention, because the embeddings are normed.

Dimensions as in :mod:`prb_jax.models.encoder`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from prb_jax.models.config.encoder import LATER, EncoderConfig
from prb_jax.models.encoder_layers import activate, layer_norm, run_stack
from prb_jax.models.layers import float32_einsum, project, rotary_angles, rotate
from prb_jax.models.parameter import Axes, Declaring, drawn, parameter, places_in_tensor
from prb_jax.platform.sharding import Constrain

_INPUT_NORM = "input_norm"


class ModernLayer(Declaring):
    """Attention in both directions and a gated mlp, each with a norm before it and a residual connection."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        modern = config.modern
        assert modern is not None
        width, mlp = config.hidden_size, config.intermediate_size

        def linear(tensor: str, inputs: int, axes: Axes, biased: bool, **outputs: int) -> None:
            places = places_in_tensor(outputs)
            for name, size in outputs.items():
                stored: Any = places[name] if len(outputs) > 1 else {}
                declared: Any = {
                    "axes": axes,
                    "hf": f"{tensor}.weight",
                    "turned": True,
                    "dtype": dtype,
                    **stored,
                }
                setattr(self, name, drawn(rngs, inputs, size, **declared))
                if biased:
                    axis = None if axes[1] == "model" else axes[1]
                    bias = parameter(jnp.zeros((size,), dtype), axes=(axis,), hf=f"{tensor}.bias", **stored)
                    setattr(self, f"{name}_bias", bias)

        biased = modern.attention_bias
        linear("attn.Wqkv", width, ("model", "heads"), biased, q=width, k=width, v=width)
        linear("attn.Wo", width, ("heads", "model"), biased, o=width)
        for suffix in ("", "_bias")[: 1 + modern.norm_bias]:
            start, tensor = (jnp.zeros, "bias") if suffix else (jnp.ones, "weight")
            norm = parameter(start((width,), dtype), axes=(None,), hf=f"mlp_norm.{tensor}")
            setattr(self, f"mlp_norm{suffix}", norm)
        linear("mlp.Wi", width, ("model", "mlp"), modern.mlp_bias, gate=mlp, up=mlp)
        linear("mlp.Wo", mlp, ("mlp", "model"), modern.mlp_bias, down=width)
        self.close()

    def project(self, name: str, x: jax.Array) -> jax.Array:
        """Apply a matrix, and its bias if it has one, to x [..., I]: [..., O]."""
        bias = getattr(self, f"{name}_bias", None)
        return project(x, getattr(self, name)[...], None if bias is None else bias[...])

    def __call__(
        self,
        x: jax.Array,
        *,
        is_first: jax.Array,
        seen: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        constrain: Constrain,
    ) -> jax.Array:
        """Run the layer on x [B, L, D].

        Args:
          x: States.
          is_first: True for the layer without a norm before attention, bool [].
          seen: Mask of visible keys of each query, bool [B, L, L].
          angles: Cosines and sines of the rotary embedding [1, L, H / 2].
          constrain: Function that sets the sharding of activations.
        """
        config = self.config
        heads = (config.num_attention_heads, config.head_dim)
        y = jnp.where(is_first, x, normed(self, _INPUT_NORM, x, config))
        q, k, v = (
            constrain(self.project(name, y).reshape(*y.shape[:-1], *heads), ("batch", None, "heads", None))
            for name in "qkv"
        )
        q, k = rotate(q, *angles, scale=config.head_dim**-0.5), rotate(k, *angles)
        scores = jnp.where(seen[:, None], float32_einsum("bqnh,bknh->bnqk", q, k), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = float32_einsum("bnqk,bknh->bqnh", weights.astype(x.dtype), v)
        x = x + self.project("o", mixed.astype(x.dtype).reshape(x.shape))
        x = constrain(x, ("batch", None, None))
        y = normed(self, "mlp_norm", x, config)
        active = activate(self.project("gate", y).astype(jnp.float32), config.hidden_activation)
        hidden = (active * self.project("up", y).astype(jnp.float32)).astype(x.dtype)
        return constrain(x + self.project("down", hidden), ("batch", None, None))


def normed(module: nnx.Module, name: str, x: jax.Array, config: EncoderConfig) -> jax.Array:
    """Apply the layer norm ``name`` of a module, with a bias if it has one."""
    bias = getattr(module, f"{name}_bias", None)
    weight = getattr(module, name)[...]
    return layer_norm(x, weight, None if bias is None else bias[...], eps=config.layer_norm_eps)


def declare_input_norms(layers: ModernLayer, *, dtype: DTypeLike) -> None:
    """Declare the norms before attention of stacked layers: every layer but the first has one."""
    config = layers.config
    assert config.modern is not None
    shape = (config.num_hidden_layers - 1, config.hidden_size)
    for suffix in ("", "_bias")[: 1 + config.modern.norm_bias]:
        start, tensor = (jnp.zeros, "bias") if suffix else (jnp.ones, "weight")
        norm = parameter(start(shape, dtype), axes=(None,), hf=f"attn_norm.{tensor}", part=LATER)
        setattr(layers, f"{_INPUT_NORM}{suffix}", norm)
        layers.order += (f"{_INPUT_NORM}{suffix}",)


def run_layers(layers: ModernLayer, x: jax.Array, *, seen: jax.Array, constrain: Constrain) -> jax.Array:
    """Run all layers on x [B, L, D].

    Args:
      layers: Stacked layers.
      x: Normed embeddings.
      seen: Mask of visible tokens, bool [B, L].
      constrain: Function that sets the sharding of activations.
    """
    config = layers.config
    modern = config.modern
    assert modern is not None
    places = jnp.arange(x.shape[1])
    distances = jnp.abs(places[:, None] - places)
    # A token of padding far from all tokens sees itself: a softmax over nothing would be NaN.
    every = seen[:, None] | (distances == 0)
    near = every & (distances <= modern.reach)
    full, sliding = (rotary_angles(places[None], rope) for rope in modern.rope)
    graph, state = nnx.split(layers)
    for name in [name for name in state if str(name).startswith(_INPUT_NORM)]:
        # The scan needs an entry for the first layer, which ignores it.
        norms: Any = state[name]
        state[name] = norms.replace(jnp.pad(norms[...], ((1, 0), (0, 0))))

    def body(x: jax.Array, state: nnx.State, slides: jax.Array, is_first: jax.Array) -> jax.Array:
        angles = jnp.where(slides, sliding[0], full[0]), jnp.where(slides, sliding[1], full[1])
        visible = jnp.where(slides, near, every)
        layer = nnx.merge(graph, state)
        return layer(x, is_first=is_first, seen=visible, angles=angles, constrain=constrain)

    return run_stack(body, x, state, jnp.asarray(modern.slides), jnp.arange(config.num_hidden_layers) == 0)
