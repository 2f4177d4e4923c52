"""The profile in the prompt of an 8B model, all weights trained, on a pod.

    prb train configs/bt_profile_context_8b_full.py data=FILE --out runs/profile_context_8b_full --distributed

float32 weights, two moments and a gradient: 16 bytes a parameter, 128 GB split over the mesh, so 16 chips
with 16 GB each are the least; activations are computed again in the backward pass.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "profile_context"
    config.profile_posts = 10
    config.loss.user_weights = True
    config.model = "Skywork/Skywork-Reward-V2-Llama-3.1-8B"
    config.tuning = "full"
    config.dtype = "bfloat16"
    config.remat = "full"
    config.max_length = 8192
    config.steps = 2_000
    config.batch.comparisons = 128
    config.optimizer.learning_rate = 5e-6
    config.mesh = "fsdp=-1"
    return config
