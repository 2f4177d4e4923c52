"""Policies trained by rewards: PPO, GRPO, RLOO, REINFORCE++ and DPO on trees of rollouts."""
