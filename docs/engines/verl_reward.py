"""The reward function of verl: a personalised reward, and a gold reward that is logged beside it.

verl loads this file by its path in every worker; the servers' addresses are in the environment:

    export PRB_REWARD=http://127.0.0.1:8000 PRB_GOLD=http://127.0.0.1:8001

Written for verl 0.8 (`custom_reward_function.path`).
"""

import os
from functools import cache

import prb_jax as prb


@cache
def rewards():
    return prb.reward_fn(os.environ["PRB_REWARD"], empty=-10.0), prb.reward_fn(
        os.environ["PRB_GOLD"], empty=-10.0
    )


def compute_score(**given):
    """`score` trains the policy; `gold` is logged by verl beside it, and nobody trains on it."""
    reward, gold = rewards()
    return {"score": reward(**given), "gold": gold(**given)}
