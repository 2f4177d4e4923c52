"""Verbs of the first minutes: `prb quickstart` and `prb completion`."""

import argparse

from prb_jax.commands.arguments import Parser
from prb_jax.commands.process import print_table, start, status_of_stop


def add_quickstart(sub: Parser) -> None:
    sub.option("--out DIR", "Output folder (default: runs/quickstart)", default="runs/quickstart")
    sub.long_run("finished steps are kept: the same command continues", distributed=False)


def run_quickstart(options: argparse.Namespace) -> int:
    """Train and evaluate two small reward models, and print their table."""
    start(options)
    from prb_jax.commands.quickstart import quickstart, quickstart_table

    result = quickstart(out=options.out, progress=not options.no_progress)
    if status := status_of_stop(result.stopped_by):
        return status
    print_table(quickstart_table(result.summary))
    print(f"figures: {result.path}; the commands of each step: {result.report}")
    if result.page.exists():
        print(f"page: {result.page} (open it in a browser)")
    again = f"prb evaluate {result.out}/persona --data pairs.jsonl --out runs/mine"
    print(f"next, with your own pairs: {again}")
    return 0


def add_completion(sub: Parser) -> None:
    shells = ("bash", "zsh", "fish", "tcsh")
    sub.option("SHELL", f"Shell to complete in: {', '.join(shells)}", choices=shells)


def run_completion(options: argparse.Namespace) -> None:
    """Print a script that completes `prb` in a shell."""
    import shtab

    print(shtab.complete(options.command_line, options.shell))
