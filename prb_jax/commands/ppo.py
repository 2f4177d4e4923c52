"""`prb ppo`: train a policy by a reward."""

import argparse

from prb_jax.commands.arguments import Parser, add_distributed, call
from prb_jax.commands.configs import add_configured, given_config, show_config
from prb_jax.commands.process import start, until_terminated, was_stopped
from prb_jax.processes.job import INTERRUPTED
from prb_jax.processes.sharing import process_index


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the checkpoints are kept: the same command continues the run")
    add_configured(
        sub,
        config="profile_in_prompt",
        overrides="model=PATH data=FILE reward=MODEL steps=100 algorithm=grpo kl.coefficient=0.02",
        out="train.json, metrics.jsonl, rollouts.jsonl, model",
    )
    add_distributed(sub)


def run(options: argparse.Namespace) -> int:
    """Train, and print the first and the last numbers."""
    config, overrides = given_config(options)
    if options.show_config:
        from prb_jax.rl.settings import load_ppo_settings

        return show_config(load_ppo_settings, config, overrides)
    with until_terminated(options):
        start(options)
        from prb_jax.rl.ppo import ppo

        result = call(ppo, options, config=config, overrides=overrides)
    if was_stopped(result.stopped_by):
        return INTERRUPTED
    if process_index() == 0:
        for name, before in result.summary["first"].items():
            print(f"{name.replace('_', ' '):>20}  {before:10.4g} -> {result.summary['last_tenth'][name]:.4g}")
        print(f"written to {result.out}; `prb sample {result.out} --data ... --out ...` draws texts from it")
    return 0
