"""`prb methods`: the methods of personalisation."""

import argparse

from prb_jax.commands.arguments import Parser
from prb_jax.commands.terminal import print_table


def add(sub: Parser) -> None:
    """Add the arguments."""


def run(options: argparse.Namespace) -> int:
    """Print a line for each method."""
    from prb_jax.personal.few_shot.registry import METHODS
    from prb_jax.reports.style import facts_table

    print_table(facts_table(METHODS.items(), title="methods of personalisation"))
    return 0
