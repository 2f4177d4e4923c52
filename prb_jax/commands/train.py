"""Verbs that train: `prb train` and `prb ppo`."""

import argparse
from collections.abc import Callable
from typing import Any, Final

from prb_jax.commands.arguments import Parser, call
from prb_jax.commands.configs import add_configured, given_config, show_config
from prb_jax.commands.process import print_table, start, status_of_stop
from prb_jax.platform.processes.sharing import process_index
from prb_jax.seams import value_at

_KEPT: Final = "the checkpoints are kept: the same command continues the run"


def add(sub: Parser) -> None:
    overrides = "model=PATH data=FILE steps=100 optimizer.learning_rate=3e-4"
    out = "train.json, metrics.jsonl, checkpoints, model"
    add_configured(sub, config="bt_user_blind", overrides=overrides, out=out, kept=_KEPT)


def add_ppo(sub: Parser) -> None:
    overrides = "model=PATH data=FILE reward=MODEL steps=100 algorithm=grpo kl.coefficient=0.02"
    out = "train.json, metrics.jsonl, rollouts.jsonl, model"
    add_configured(sub, config="profile_in_prompt", overrides=overrides, out=out, kept=_KEPT)


def run(options: argparse.Namespace) -> int:
    """Train a reward model, and print the last numbers."""

    def tell(result: Any) -> None:
        from prb_jax.reports.training import training_table

        print_table(training_table(result.summary, title=str(options.out)))
        print(f"written to {result.out}; `prb evaluate {result.out} --data ...` scores with it")

    return _run(options, "prb_jax.training.config:load_settings", "prb_jax.training.train:train", tell)


def run_ppo(options: argparse.Namespace) -> int:
    """Train a policy by a reward, and print the first and the last numbers."""

    def tell(result: Any) -> None:
        for name, before in result.summary["first"].items():
            print(f"{name.replace('_', ' '):>20}  {before:10.4g} -> {result.summary['last_tenth'][name]:.4g}")
        print(f"written to {result.out}; `prb sample {result.out} --data ... --out ...` draws texts from it")

    return _run(
        options, "prb_jax.behaviour.rl.settings:load_ppo_settings", "prb_jax.behaviour.rl.ppo:ppo", tell
    )


def _run(options: argparse.Namespace, settings: str, train: str, tell: Callable[[Any], None]) -> int:
    """Call the function `train`, and `tell` with its result; or with `--show-config` print the config."""

    config, overrides = given_config(options)
    if options.show_config:
        show_config(value_at(settings), config, overrides)
        return 0
    start(options)
    result = call(value_at(train), options, config=config, overrides=overrides)
    if status := status_of_stop(result.stopped_by):
        return status
    if process_index() == 0:
        tell(result)
    return 0
