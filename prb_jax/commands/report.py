"""`prb report`: a page about runs."""

import argparse

from prb_jax.commands.arguments import Verbs, add_verb


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "report",
        run,
        about="write a page about runs: figures, comparisons and pairs to read, in one file",
    )
    sub.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of `prb evaluate`, or of `prb train` for its curves"
    )
    sub.add_argument("--out", metavar="FILE", required=True, help="the page, as page.html")
    sub.add_argument(
        "--data",
        metavar="NAME_OR_PATH",
        nargs="+",
        action="extend",
        default=[],
        help="where the data of the runs lie now (default: as the runs name them)",
    )
    sub.add_argument(
        "--title", metavar="TEXT", default="", help="of the page (default: the names of the runs)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page."""
    from prb_jax.reports.page import report

    print(f"written to {report(options.runs, out=options.out, data=options.data, title=options.title)}")
    return 0
