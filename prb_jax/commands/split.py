"""`prb split`: disjoint parts of a data set."""

import argparse

from prb_jax.commands.arguments import Verbs, add_columns, add_verb, not_negative, with_columns


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs, "split", run, about="write a data set as parts that have no user, or no question, in common"
    )
    sub.add_argument("--by", choices=("user", "question"), required=True, help="what is in one part alone")
    sub.add_argument("--data", metavar="NAME_OR_PATH", required=True, help="what `prb evaluate --data` takes")
    add_columns(sub)
    sub.add_argument(
        "--out", metavar="DIR", required=True, help="folder for PART.jsonl; then valid as --data DIR"
    )
    sub.add_argument(
        "--parts",
        metavar="PART=SHARE",
        type=_share,
        nargs="+",
        help="names and shares of the comparisons (default: train=0.8 validation=0.1 test=0.1)",
    )
    sub.add_argument("--seed", metavar="N", type=not_negative, default=0, help="of the shuffle (default: 0)")


def _share(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected PART=SHARE, found {text!r}")
    return name, float(share)


def run(options: argparse.Namespace) -> int:
    """Split, and print how much is in each part."""
    from prb_jax.sources.split import PARTS, split

    given = options.parts or list(PARTS.items())
    if len(dict(given)) < len(given):
        options.parser.error("argument --parts: a part is named twice")
    data = with_columns(options.data, options.columns)
    made = split(data, by=options.by, out=options.out, parts=dict(given), seed=options.seed)
    for part in made.parts.values():
        print(
            f"{part.path}: {part.comparisons:,} comparisons, {part.users:,} users, {part.questions:,} questions"
        )
    other = "questions" if options.by == "user" else "users"
    print(f"no {options.by} is in two parts; {made.shared:,} {other} are")
    return 0
