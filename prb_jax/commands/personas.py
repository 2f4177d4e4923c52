"""`prb personas`: write the generated benchmark."""

import argparse

from prb_jax.commands.arguments import Parser


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("--out DIR", "folder for the files", required=True)


def run(options: argparse.Namespace) -> int:
    """Write the parts, and print where they are."""
    from prb_jax.sources import personas

    for part, path in personas.write(options.out).items():
        print(f"{path}: {len(personas.load(part)):,} comparisons")
    return 0
