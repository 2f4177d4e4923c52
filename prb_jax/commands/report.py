"""`prb report`: a page about runs."""

import argparse

from prb_jax.commands.arguments import Parser


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option(
        "RUN ...",
        "folder of `prb evaluate`, of `prb train` for its curves, or of `prb personalise`",
        dest="runs",
    )
    sub.option("--out FILE", "the page, as page.html", required=True)
    sub.option(
        "--data NAME_OR_PATH ...",
        "where the data of the runs lie now (default: as the runs name them)",
        default=[],
    )
    sub.option("--title TEXT", "of the page (default: the names of the runs)", default="")


def run(options: argparse.Namespace) -> int:
    """Write the page."""
    from prb_jax.reports.page import report

    print(f"written to {report(options.runs, out=options.out, data=options.data, title=options.title)}")
    return 0
