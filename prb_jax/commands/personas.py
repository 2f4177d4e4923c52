"""`prb personas`: write the generated benchmark."""

import argparse

from prb_jax.commands.arguments import Verbs, add_verb


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs, "personas", run, about="write the generated benchmark as JSON lines, one file for each part"
    )
    sub.option("--out DIR", "folder for the files", required=True)


def run(options: argparse.Namespace) -> int:
    """Write the parts, and print where they are."""
    from prb_jax.sources import personas

    for part, path in personas.write(options.out).items():
        print(f"{path}: {len(personas.load(part)):,} comparisons")
    return 0
