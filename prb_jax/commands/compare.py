"""`prb compare`: paired differences between finished runs."""

import argparse
import json

from prb_jax.commands.arguments import Parser
from prb_jax.commands.terminal import print_table


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("RUN ...", "run folders of `prb evaluate`, two or more", dest="runs")
    sub.option("--out DIR", "folder for compare.json")
    sub.option("--format", "print what compare.json holds instead of tables", choices=("json",))
    sub.option("--across-protocols", "compare runs with different protocols nevertheless")


def run(options: argparse.Namespace) -> int:
    """Compare, and print the ranks and the differences."""
    from prb_jax.reports.comparison import COMPARE, compare, render_comparison

    compared = compare(*options.runs, out=options.out, across_protocols=options.across_protocols)
    if options.format == "json":
        print(json.dumps(compared, indent=2))
        return 0
    print_table(render_comparison(compared))
    if options.out is not None:
        print(f"written to {options.out}/{COMPARE}")
    return 0
