"""A new linear head on a frozen 8B backbone: the cheapest reward model, and the baseline for all others.

    prb train configs/bt_user_blind_8b_head.py model=PATH data=FILE --out runs/user_blind_8b_head

There is no backward pass through the backbone and no optimiser state for it.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "user_blind"
    config.model = "Qwen/Qwen3-8B"
    config.init_head = True
    config.tuning = "head"
    config.dtype = "bfloat16"
    config.max_length = 4096
    config.steps = 1_000
    config.batch.comparisons = 128
    config.optimizer.learning_rate = 1e-3
    config.mesh = "fsdp=-1"
    return config
