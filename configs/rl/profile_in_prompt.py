"""A policy that is shown the user's profile, trained by a reward model with PPO and LoRA.

    prb ppo configs/rl/profile_in_prompt.py model=PATH data=FILE reward=REWARD_MODEL --out runs/policy

`algorithm=grpo` (with the KL in the loss), `rloo` and `reinforce++` run with the same settings. The settings are those
that published re-implementations of PPO agree on: the KL in the reward with 0.05, gamma 1, lambda 0.95, four epochs,
clip 0.2, temperature 0.7. Expected: the reward rises, and so does the KL; once it passes some tens of nats, read the
rollouts.
"""

from ml_collections import ConfigDict

from prb_jax.behaviour.rl.settings import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.algorithm = "ppo"
    config.profile_posts = 10
    config.rollout.n = 4
    config.rollout.temperature = 0.7
    config.batch.prompts = 16
    config.batch.minibatch = 4
    config.batch.epochs = 4
    config.optimizer.learning_rate = 3e-5
    return config
