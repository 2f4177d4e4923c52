"""The parameters of a decoder with random values, for training from scratch and for benchmarks.

Only what starts from random weights imports this: flax takes a second to import.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder_layer import Params


class Decoder(nnx.Module):
    """A decoder with a linear score head; the layers are stacked on axis 0, their matrices are [L, in, out].

    Args:
        config: architecture.
        rngs: for random weights: the matrices have variance 1 / inputs.
        dtype: of the parameters.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> None:
        layers, width, mlp = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        unit = 0.0 if config.norm_plus_one else 1.0

        def drawn(*shape: int, scale: float | None = None) -> nnx.Param:
            factor = shape[-2] ** -0.5 if scale is None else scale
            return nnx.Param(factor * jax.random.normal(rngs.params(), shape, dtype))

        # Scaled embeddings (Gemma) are small so that the residual stream starts at size one everywhere.
        self.embed = drawn(config.vocab_size, width, scale=1.0 / (config.embedding_scale or 1.0))
        matrices = {
            "q": (width, queries), "k": (width, keys), "v": (width, keys), "o": (queries, width),
            "gate": (width, mlp), "up": (width, mlp), "down": (mlp, width),
        }  # fmt: skip
        vectors = {"input_norm": (width, unit), "mlp_norm": (width, unit)}
        if config.qk_norm:
            vectors |= dict.fromkeys(("q_norm", "k_norm"), (config.head_dim, unit))
        if config.post_norms:
            vectors |= dict.fromkeys(("post_attention_norm", "post_mlp_norm"), (width, unit))
        biased = ("q", "k", "v") * config.attention_bias + ("o",) * config.attention_output_bias
        for name in biased + ("gate", "up", "down") * config.mlp_bias:
            vectors[f"{name}_bias"] = (matrices[name][1], 0.0)
        self.layers = nnx.Dict(
            {name: drawn(layers, *shape) for name, shape in matrices.items()}
            | {
                name: nnx.Param(jnp.full((layers, size), value, dtype))
                for name, (size, value) in vectors.items()
            }
        )
        self.final_norm = nnx.Param(jnp.full((width,), unit, dtype))
        self.score = drawn(width, config.num_labels)


def init_params(config: DecoderConfig, *, seed: int = 0, dtype: jnp.dtype = jnp.float32) -> Params:
    """Random parameters as a nested dict."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(seed), dtype=dtype)))
