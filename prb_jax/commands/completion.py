"""`prb completion`: print a script for a shell."""

import argparse

from prb_jax.commands.arguments import Verbs, add_verb


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(verbs, "completion", run, about="print a script that completes prb in your shell")
    sub.option("shell", "", choices=("bash", "zsh", "fish", "tcsh"))


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    print(shtab.complete(options.command_line, options.shell))
    return 0
