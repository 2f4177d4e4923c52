"""`prb past-texts`: preference pairs from texts that people wrote themselves."""

import argparse

from prb_jax.commands.arguments import Verbs, add_verb


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "past-texts",
        run,
        about="write preference pairs from texts that people wrote themselves, as LaMP has them",
    )
    sub.add_argument("--inputs", metavar="FILE", required=True, help="JSON: a list of {id, input, profile}")
    sub.add_argument("--outputs", metavar="FILE", required=True, help="JSON: {golds: [{id, output}]}")
    sub.add_argument(
        "--samples",
        metavar="DIR",
        nargs="+",
        default=[],
        help="runs of `prb sample` on the file without them",
    )
    sub.add_argument("--out", metavar="FILE", required=True, help=".jsonl")


def run(options: argparse.Namespace) -> int:
    """Write the pairs, and print how many there are."""
    from prb_jax.generation.past_texts import past_texts

    found = past_texts(options.inputs, options.outputs, out=options.out, samples=options.samples)
    print(f"{found.path}: {sum(found.counts.values()):,} pairs of {found.users:,} users")
    for source, count in found.counts.items():
        without = found.without.get(source, 0)
        print(f"{source}: {count:,} pairs" + (f", {without:,} inputs have none" if without else ""))
    return 0
