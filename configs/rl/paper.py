"""The recipe of Personalised RewardBench (arXiv 2604.07343) for its downstream test: PPO with all weights trained.

    prb ppo configs/rl/paper.py model=PATH data=FILE reward=REWARD_MODEL --out runs/paper

Batches of 128 prompts in minibatches of 16, one rollout of at most 512 tokens a prompt, temperature 1, gamma 1, lambda
1, clip 0.2, one epoch, no entropy bonus, and no KL at all (it is measured here). The value function starts from the
policy's checkpoint with ten times its learning rate. The score is the reward divided by 10.

What the released code does beside this is off: a reward that fails stops the run (`scoring.failed=5` would give 0.5
instead), and a long response is not cut before it is scored (`scoring.protocol=paper scoring.max_length=8192` would).
"""

from ml_collections import ConfigDict

from prb_jax.behaviour.rl.settings import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.algorithm = "ppo"
    config.tuning = "full"
    config.dtype = "bfloat16"
    config.remat = "dots"
    config.profile_posts = 10
    config.max_length = 8192 + 512
    config.rollout.n = 1
    config.rollout.temperature = 1.0
    config.rollout.max_new_tokens = 512
    config.scoring.scale = 0.1
    config.kl.coefficient = 0.0
    config.advantage.gamma = 1.0
    config.advantage.lam = 1.0
    config.loss.clip = 0.2
    config.loss.value_clip = 0.5
    config.loss.value_coefficient = 1.0
    config.loss.entropy_coefficient = 0.0
    config.value.trunk = "own"
    config.value.learning_rate = 5e-6
    config.optimizer.learning_rate = 5e-7
    config.optimizer.weight_decay = 0.01
    config.batch.prompts = 128
    config.batch.minibatch = 16
    config.batch.epochs = 1
    return config
