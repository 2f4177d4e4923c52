"""`prb ppo`: train a policy by a reward."""

import argparse
from pathlib import Path

from prb_jax.commands.arguments import Verbs, add_no_progress, add_verb
from prb_jax.commands.process import start, until_terminated
from prb_jax.processes.job import INTERRUPTED


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "ppo",
        run,
        about="train a language model by a reward; the same command continues a run",
        after_interrupt="the checkpoints are kept: the same command continues the run",
    )
    sub.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="Python, YAML or TOML file, as configs/rl/profile_in_prompt.py",
    )
    sub.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="as model=PATH data=FILE reward=MODEL steps=100 algorithm=grpo kl.coefficient=0.02",
    )
    sub.add_argument(
        "--out", metavar="DIR", help="run folder: train.json, metrics.jsonl, rollouts.jsonl, model"
    )
    add_no_progress(sub)
    sub.add_argument(
        "--show-config",
        action="store_true",
        help="print a YAML config of every option with its meaning, and train nothing",
    )


def run(options: argparse.Namespace) -> int:
    """Train, and print the first and the last numbers."""
    given = [word for word in (options.config, *options.overrides) if word is not None]
    is_config = bool(given) and ("=" not in given[0] or Path(given[0]).is_file())
    config, overrides = given[0] if is_config else None, given[is_config:]
    if options.show_config:
        from prb_jax.rl.settings import load_ppo_settings
        from prb_jax.training.meanings import explained_settings

        print(explained_settings(load_ppo_settings(config, overrides, complete=False)), end="")
        return 0
    if config is None or options.out is None:
        missing = [name for name, value in (("CONFIG", config), ("--out", options.out)) if value is None]
        return options.parser.error(f"the following arguments are required: {', '.join(missing)}")
    with until_terminated(options):
        start(options)
        from prb_jax.rl.ppo import ppo

        result = ppo(
            config,
            out=options.out,
            overrides=overrides,
            progress=not options.no_progress,
            command=options.command,
        )
    if result.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if result.stopped_by is not None:
        return INTERRUPTED  # what was saved is said already
    for name, before in result.summary["first"].items():
        print(f"{name.replace('_', ' '):>20}  {before:10.4g} -> {result.summary['last_tenth'][name]:.4g}")
    print(f"written to {result.out}; `prb sample {result.out} --data ... --out ...` draws texts from it")
    return 0
