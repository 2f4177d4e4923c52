"""`prb past-texts`: preference pairs from texts that people wrote themselves."""

import argparse

from prb_jax.commands.arguments import Parser


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("--inputs FILE", "JSON: a list of {id, input, profile}", required=True)
    sub.option("--outputs FILE", "JSON: {golds: [{id, output}]}", required=True)
    sub.option("--samples DIR ...", "runs of `prb sample` on the file without them", default=[], extend=False)
    sub.option("--out FILE", ".jsonl", required=True)


def run(options: argparse.Namespace) -> int:
    """Write the pairs, and print how many there are."""
    from prb_jax.generation.past_texts import past_texts

    found = past_texts(options.inputs, options.outputs, out=options.out, samples=options.samples)
    print(f"{found.path}: {sum(found.counts.values()):,} pairs of {found.users:,} users")
    for source, count in found.counts.items():
        without = found.without.get(source, 0)
        print(f"{source}: {count:,} pairs" + (f", {without:,} inputs have none" if without else ""))
    return 0
