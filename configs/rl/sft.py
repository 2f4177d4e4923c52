"""The first stage: a policy learns to write the preferred responses of the data, by cross-entropy, all weights trained.

    prb ppo configs/rl/sft.py model=PATH data=FILE --out runs/sft

It draws no rollouts and asks no reward. The loss is the mean over the tokens of the responses of an update, with the
token that ends each of them, in float32; prompt and profile are read and not learned. Expected: the loss falls, and
`prb sample runs/sft` writes texts like those of the data, from which `prb ppo` with a reward can start.
"""

from ml_collections import ConfigDict

from prb_jax.behaviour.rl.settings import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.algorithm = "sft"
    config.tuning = "full"
    config.profile_posts = 10
    config.batch.prompts = 16
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_share = 0.03
    config.steps = 1_000
    return config
