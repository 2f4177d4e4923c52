"""A 27B model, all weights trained, on a pod.

    prb train configs/bt_user_blind_27b_full.py data=FILE --out runs/user_blind_27b_full --distributed

16 bytes a parameter for weights, moments and gradient: 440 GB split over the mesh; 64 chips with 16 GB, or 8
with 95 GB. The same command runs in every process of the pod, with DIR on storage that all of them see.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "user_blind"
    config.model = "Skywork/Skywork-Reward-Gemma-2-27B-v0.2"
    config.tuning = "full"
    config.dtype = "bfloat16"
    config.remat = "full"
    config.max_length = 4096
    config.steps = 2_000
    config.batch.comparisons = 256
    config.optimizer.learning_rate = 2e-6
    config.optimizer.schedule = "wsd"
    config.mesh = "fsdp=-1,tensor=4"
    config.checkpoint.every = 200
    return config
