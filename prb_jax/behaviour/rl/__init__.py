"""Policies trained with rewards: PPO, GRPO, RLOO, REINFORCE++ and DPO on trees of rollouts."""
