"""The offline control: direct preference optimisation (arXiv 2305.18290) on the labelled pairs of the data, with LoRA.

    prb ppo configs/rl/dpo.py model=PATH data=FILE --out runs/dpo

It draws no rollouts and asks no reward. Beta 0.1; eight pairs an update. Expected: the loss falls from log 2, and the
accuracy on the pairs of a step rises above a half within an epoch; it says nothing of texts that the policy writes.
"""

from ml_collections import ConfigDict

from prb_jax.behaviour.rl.settings import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.algorithm = "dpo"
    config.profile_posts = 10
    config.batch.prompts = 8
    config.loss.dpo_beta = 0.1
    config.optimizer.learning_rate = 3e-5
    return config
