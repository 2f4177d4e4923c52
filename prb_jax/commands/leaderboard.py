"""`prb leaderboard`: all runs below a folder in one table."""

import argparse

from prb_jax.commands.arguments import Parser, picked
from prb_jax.commands.terminal import print_table

FORMATS = ("csv", "latex", "markdown", "rewardbench")


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("DIR", "folder that is looked through, at any depth", dest="folder")
    sub.option("--format", "print this instead of a table for the terminal", choices=FORMATS)
    sub.option("--unfinished", "runs that are not finished too")
    sub.option("--controls", "the controls of runs too, as runs of their own")
    sub.option(
        "--upper-bounds", "runs that were told the true rubric or narrative too, which no model could know"
    )


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    from prb_jax.reports.leaderboard import format_leaderboard, leaderboard, render_leaderboard

    entries = leaderboard(options.folder, **picked(options, "unfinished controls upper_bounds"))
    if options.format is None:
        print_table(render_leaderboard(entries))
    else:
        print(format_leaderboard(entries, options.format), end="")
    return 0
