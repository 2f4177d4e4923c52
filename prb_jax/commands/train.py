"""`prb train`: train a reward model."""

import argparse

from prb_jax.commands.arguments import Parser, add_distributed, call
from prb_jax.commands.configs import add_configured, given_config, show_config
from prb_jax.commands.process import start, until_terminated, was_stopped
from prb_jax.commands.terminal import print_table
from prb_jax.processes.job import INTERRUPTED
from prb_jax.processes.sharing import process_index


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the checkpoints are kept: the same command continues the run")
    add_configured(
        sub,
        config="bt_user_blind",
        overrides="model=PATH data=FILE steps=100 optimizer.learning_rate=3e-4",
        out="train.json, metrics.jsonl, checkpoints, model",
    )
    add_distributed(sub)


def run(options: argparse.Namespace) -> int:
    """Train, and print the last numbers."""
    config, overrides = given_config(options)
    if options.show_config:
        from prb_jax.training.config import load_settings

        return show_config(load_settings, config, overrides)
    with until_terminated(options):
        start(options)
        from prb_jax.reports.tables import training_table
        from prb_jax.training.train import train

        result = call(train, options, config=config, overrides=overrides)
    if was_stopped(result.stopped_by):
        return INTERRUPTED
    if process_index() == 0:
        print_table(training_table(result.summary, title=str(options.out)))
        print(f"written to {result.out}; `prb evaluate {result.out} --data ...` scores with it")
    return 0
