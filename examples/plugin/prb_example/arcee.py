"""A decoder family of your own: Arcee's AFM, a Llama whose mlp has no gate and squares a ReLU.

Parameters are declared with their shape, their axes and the name of their tensor; checkpoints, meshes, LoRA, int8,
sampling and plans follow from that.
"""

import jax.numpy as jnp
from flax import nnx

from prb_jax.models.config.families import family
from prb_jax.models.decoder_layer import DecoderLayer


class ArceeLayer(DecoderLayer):
    """A layer of Llama with another mlp: down(relu(up(x)) ** 2)."""

    def declare_mlp(self, *, rngs, dtype):
        """Declare two matrices, with biases where ``mlp_bias`` says so."""
        width, mlp = self.config.hidden_size, self.config.intermediate_size
        kinds = {"rngs": rngs, "dtype": dtype, "biased": self.config.mlp_bias}
        self.declare_linear("mlp", ("model", "mlp"), width, up=mlp, **kinds)
        self.declare_linear("mlp", ("mlp", "model"), mlp, down=width, **kinds)

    def run_mlp(self, x, project):
        """Return the mlp of x [B, T, D]; the activation is float32, as everywhere."""
        active = nnx.relu(project("up", x).astype(jnp.float32))
        return project("down", jnp.square(active).astype(x.dtype))


ARCEE = family(
    "Arcee",
    {"max_position_embeddings": 4096, "num_key_value_heads": None, "rms_norm_eps": 1e-5},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    windows="none",
    layer=ArceeLayer,
    activation="relu2",
)
