"""A model of two million parameters from scratch, that reads the user's profile, on a laptop.

    prb train configs/scratch_profile_context.py --out runs/scratch_profile_context

The tokenizer is learned from the training data. Expected: minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "profile_context"
    config.profile_posts = 10
    config.loss.user_weights = True
    config.model = "scratch"
    config.data = "personas:train,personas:generic-train"
    config.tuning = "full"
    config.steps = 1_500
    config.batch.comparisons = 32
    config.optimizer.learning_rate = 1e-3
    config.scratch.hidden_size = 160
    config.scratch.intermediate_size = 480
    config.scratch.num_hidden_layers = 4
    config.scratch.num_attention_heads = 5
    config.scratch.num_key_value_heads = 5
    config.scratch.vocab_size = 4_096
    return config
