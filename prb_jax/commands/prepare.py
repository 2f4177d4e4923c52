"""`prb prepare`: write comparisons as a data set of tensorflow-datasets."""

import argparse

from prb_jax.commands.arguments import Verbs, add_verb


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "prepare",
        run,
        about="write comparisons as a data set of tensorflow-datasets (array_record, random access)",
    )
    sub.add_argument(
        "--data",
        metavar="NAME_OR_PATH",
        nargs="+",
        action="extend",
        required=True,
        help="what `prb evaluate --data` takes; repeatable",
    )
    sub.add_argument(
        "--split",
        metavar="S",
        nargs="+",
        default=["test"],
        help="splits of the data to read; they keep their names (default: test)",
    )
    sub.add_argument("--out", metavar="DIR", required=True, help="folder for it; then valid as --data DIR")


def run(options: argparse.Namespace) -> int:
    """Write the data set, and print how much is in it."""
    from prb_jax.sources.prepare import prepare

    prepared = prepare(options.data, out=options.out, splits=options.split)
    for split, count in prepared.counts.items():
        print(f"{split}: {count:,} comparisons")
    print(f"written to {prepared.folder}")
    return 0
