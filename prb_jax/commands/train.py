"""`prb train`: train a reward model."""

import argparse
from pathlib import Path

from prb_jax.commands.arguments import Verbs, add_distributed, add_no_progress, add_verb
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.processes.job import INTERRUPTED
from prb_jax.processes.sharing import process_index


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "train",
        run,
        about="train a reward model; the same command continues a run",
        after_interrupt="the checkpoints are kept: the same command continues the run",
    )
    sub.add_argument(
        "config", metavar="CONFIG", nargs="?", help="Python, YAML or TOML file, as configs/bt_user_blind.py"
    )
    sub.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="as model=PATH data=FILE steps=100 optimizer.learning_rate=3e-4",
    )
    sub.add_argument("--out", metavar="DIR", help="run folder: train.json, metrics.jsonl, checkpoints, model")
    add_no_progress(sub)
    sub.add_argument(
        "--show-config",
        action="store_true",
        help="print a YAML config of every option with its meaning, and train nothing",
    )
    add_distributed(sub)


def run(options: argparse.Namespace) -> int:
    """Train, and print the last numbers."""
    given = [word for word in (options.config, *options.overrides) if word is not None]
    is_config = bool(given) and ("=" not in given[0] or Path(given[0]).is_file())
    config, overrides = given[0] if is_config else None, given[is_config:]
    if options.show_config:
        from prb_jax.training.config import load_settings
        from prb_jax.training.meanings import explained_settings

        print(explained_settings(load_settings(config, overrides, complete=False)), end="")
        return 0
    if config is None or options.out is None:
        missing = [name for name, value in (("CONFIG", config), ("--out", options.out)) if value is None]
        return options.parser.error(f"the following arguments are required: {', '.join(missing)}")
    with until_terminated(options):
        start(options)
        from prb_jax.reports.training import training_table
        from prb_jax.training.train import train

        result = train(
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
    if process_index() == 0:
        print_table(training_table(result.summary, title=str(options.out)))
        print(f"written to {result.out}; `prb evaluate {result.out} --data ...` scores with it")
    return 0
