"""The profile in the prompt of an 8B model, LoRA, on one host with accelerators.

    prb train configs/bt_profile_context_8b_lora.py data=FILE --out runs/profile_context_8b_lora

Starts from a public reward model; any other checkpoint: `model=PATH`, with `init_head=true` for a language
model. The frozen weights are bfloat16 (16 GB, split over all devices) and have no optimiser state; what is
trained takes 12 bytes a parameter, 0.5 GB at rank 16. Expected on Personalized-RewardBench-like data: above
the model it starts from, which the paper reports at 75.9 % for the best ones.
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
    config.tuning = "lora"
    config.dtype = "bfloat16"
    config.remat = "full"
    config.max_length = 8192
    config.steps = 2_000
    config.batch.comparisons = 64
    config.optimizer.learning_rate = 1e-4
    config.mesh = "fsdp=-1"
    return config
