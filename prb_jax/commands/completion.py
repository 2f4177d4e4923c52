"""`prb completion`: print a script for a shell."""

import argparse

from prb_jax.commands.arguments import Parser


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("shell", "", choices=("bash", "zsh", "fish", "tcsh"))


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    print(shtab.complete(options.command_line, options.shell))
    return 0
