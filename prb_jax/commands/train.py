"""Verbs that train: `prb train` and `prb ppo`."""

import argparse

from prb_jax.commands.arguments import Parser, call
from prb_jax.commands.configs import add_configured, given_config, show_config
from prb_jax.commands.process import print_table, start, status_of_stop
from prb_jax.processes.sharing import process_index


def add(sub: Parser) -> None:
    """Add the arguments of `prb train`."""
    sub.set_defaults(after_interrupt="the checkpoints are kept: the same command continues the run")
    add_configured(
        sub,
        config="bt_user_blind",
        overrides="model=PATH data=FILE steps=100 optimizer.learning_rate=3e-4",
        out="train.json, metrics.jsonl, checkpoints, model",
    )
    sub.distributed()


def run(options: argparse.Namespace) -> int:
    """Train a reward model, and print the last numbers."""
    config, overrides = given_config(options)
    if options.show_config:
        from prb_jax.training.config import load_settings

        show_config(load_settings, config, overrides)
        return 0
    start(options)
    from prb_jax.reports.training import training_table
    from prb_jax.training.train import train

    result = call(train, options, config=config, overrides=overrides)
    if status := status_of_stop(result.stopped_by):
        return status
    if process_index() == 0:
        print_table(training_table(result.summary, title=str(options.out)))
        print(f"written to {result.out}; `prb evaluate {result.out} --data ...` scores with it")
    return 0


def add_ppo(sub: Parser) -> None:
    """Add the arguments of `prb ppo`."""
    sub.set_defaults(after_interrupt="the checkpoints are kept: the same command continues the run")
    add_configured(
        sub,
        config="profile_in_prompt",
        overrides="model=PATH data=FILE reward=MODEL steps=100 algorithm=grpo kl.coefficient=0.02",
        out="train.json, metrics.jsonl, rollouts.jsonl, model",
    )
    sub.distributed()


def run_ppo(options: argparse.Namespace) -> int:
    """Train a policy by a reward, and print the first and the last numbers."""
    config, overrides = given_config(options)
    if options.show_config:
        from prb_jax.rl.settings import load_ppo_settings

        show_config(load_ppo_settings, config, overrides)
        return 0
    start(options)
    from prb_jax.rl.ppo import ppo

    result = call(ppo, options, config=config, overrides=overrides)
    if status := status_of_stop(result.stopped_by):
        return status
    if process_index() == 0:
        for name, before in result.summary["first"].items():
            print(f"{name.replace('_', ' '):>20}  {before:10.4g} -> {result.summary['last_tenth'][name]:.4g}")
        print(f"written to {result.out}; `prb sample {result.out} --data ... --out ...` draws texts from it")
    return 0
