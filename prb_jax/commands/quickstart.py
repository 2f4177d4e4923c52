"""`prb quickstart`: train and evaluate two small reward models."""

import argparse

from prb_jax.commands.arguments import Parser, add_no_progress
from prb_jax.commands.process import start, until_terminated, was_stopped
from prb_jax.commands.terminal import print_table
from prb_jax.processes.job import INTERRUPTED


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="what was finished is kept: the same command continues")
    sub.option("--out DIR", "default: runs/quickstart", default="runs/quickstart")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Run the quickstart, and print its table."""
    start(options)
    from prb_jax.quickstart import quickstart, quickstart_table

    with until_terminated(options):
        result = quickstart(out=options.out, progress=not options.no_progress)
    if was_stopped(result.stopped_by):
        return INTERRUPTED
    print_table(quickstart_table(result.summary))
    print(f"figures: {result.path}; the commands of each step: {result.report}")
    if result.page.exists():
        print(f"page: {result.page} (open it in a browser)")
    print(
        f"next, with pairs of your own: prb evaluate {result.out}/persona --data pairs.jsonl --out runs/mine"
    )
    return 0
