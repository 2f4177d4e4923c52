"""The parameters of a decoder, with random values: modules of NNX that are used as plain trees.

Only what starts from random weights imports this: flax takes a second to import.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder_layer import Params


class DecoderLayers(nnx.Module):
    """The parameters of all layers, stacked on axis 0. Matrices are [L, in, out]."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        layers, width, mlp = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        unit = 0.0 if config.norm_plus_one else 1.0

        def matrix(inputs: int, outputs: int) -> nnx.Param:
            scale = inputs**-0.5
            return nnx.Param(scale * jax.random.normal(rngs.params(), (layers, inputs, outputs), dtype))

        def vector(size: int, value: float) -> nnx.Param:
            return nnx.Param(jnp.full((layers, size), value, dtype))

        self.input_norm = vector(width, unit)
        self.q, self.k, self.v = matrix(width, q_size), matrix(width, kv_size), matrix(width, kv_size)
        self.o = matrix(q_size, width)
        if config.attention_bias:
            self.q_bias, self.k_bias, self.v_bias = vector(q_size, 0), vector(kv_size, 0), vector(kv_size, 0)
        if config.attention_output_bias:
            self.o_bias = vector(width, 0)
        if config.qk_norm:
            self.q_norm, self.k_norm = vector(config.head_dim, unit), vector(config.head_dim, unit)
        if config.post_norms:
            self.post_attention_norm, self.post_mlp_norm = vector(width, unit), vector(width, unit)
        self.mlp_norm = vector(width, unit)
        self.gate, self.up, self.down = matrix(width, mlp), matrix(width, mlp), matrix(mlp, width)
        if config.mlp_bias:
            self.gate_bias, self.up_bias, self.down_bias = vector(mlp, 0), vector(mlp, 0), vector(width, 0)


class Decoder(nnx.Module):
    """A decoder with a linear score head.

    Args:
        config: architecture.
        rngs: for random weights: the matrices have variance 1 / inputs.
        dtype: of the parameters.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> None:
        width, labels = config.hidden_size, config.num_labels
        unit = 0.0 if config.norm_plus_one else 1.0
        # Scaled embeddings (Gemma) are small so that the residual stream starts at size one everywhere.
        embed_scale = 1.0 / (config.embedding_scale or 1.0)
        self.embed = nnx.Param(
            embed_scale * jax.random.normal(rngs.params(), (config.vocab_size, width), dtype)
        )
        self.layers = DecoderLayers(config, rngs, dtype)
        self.final_norm = nnx.Param(jnp.full((width,), unit, dtype))
        self.score = nnx.Param(width**-0.5 * jax.random.normal(rngs.params(), (width, labels), dtype))


def init_params(config: DecoderConfig, *, seed: int = 0, dtype: jnp.dtype = jnp.float32) -> Params:
    """Random parameters as a nested dict: for training from scratch and for benchmarks."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(seed), dtype=dtype)))
