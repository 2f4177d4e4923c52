"""A soft prompt for each user before an 8B model with LoRA.

    prb train configs/bt_persona_embedding_8b_lora.py data=FILE --out runs/persona_embedding_8b_lora

10,000 users with 8 tokens of 4,096 numbers are a table of 1.3 GB; a step touches only the rows of its users.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "persona_embedding"
    config.loss.user_weights = True
    config.validation.by = "id"
    config.model = "Skywork/Skywork-Reward-V2-Llama-3.1-8B"
    config.tuning = "lora"
    config.dtype = "bfloat16"
    config.remat = "full"
    config.max_length = 4096
    config.steps = 2_000
    config.batch.comparisons = 64
    config.optimizer.learning_rate = 1e-4
    config.mesh = "fsdp=-1"
    return config
