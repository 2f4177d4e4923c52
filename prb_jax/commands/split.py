"""`prb split`: disjoint parts of a data set."""

import argparse

from prb_jax.commands.arguments import Parser, add_columns, not_negative, with_columns


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("--by", "what is in one part alone", choices=("user", "question"), required=True)
    sub.option("--data NAME_OR_PATH", "what `prb evaluate --data` takes", required=True)
    add_columns(sub)
    sub.option("--out DIR", "folder for PART.jsonl; then valid as --data DIR", required=True)
    sub.option(
        "--parts PART=SHARE ...",
        "names and shares of the comparisons (default: train=0.8 validation=0.1 test=0.1)",
        _share,
        extend=False,
    )
    sub.option("--seed N", "of the shuffle", not_negative, default=0)


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
