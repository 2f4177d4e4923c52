"""`prb audit`: people judge pairs on a local page; figures of agreement; export."""

import argparse
import os

from prb_jax.commands.arguments import Parser, add_data, call, given_flags, not_negative, positive
from prb_jax.commands.process import until_terminated


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="every judgement that was submitted is kept; the same command goes on")
    sub.option("DIR", "folder of the audit", dest="folder")
    what = sub.add_mutually_exclusive_group()
    what.add_argument(
        "--report", action="store_true", help="print the figures so far, and write them to report.json"
    )
    what.add_argument("--export", metavar="FILE", help="write the judgements so far, as .jsonl or .csv")
    add_data(sub, about="pairs, as of `prb evaluate`; needed for a new audit", required=False)
    sub.option("--gold NAME_OR_PATH ...", "pairs whose personal fit is certain")
    sub.option("--sample N", "a random choice of N of the pairs", positive)
    sub.option("--per-item N", "people who judge each pair (default: 3)", positive)
    sub.option(
        "--check-every N",
        "one judgement in N is a check: a gold pair, or one that was judged before (default: 10; 0: none)",
        not_negative,
    )
    sub.option(
        "--margin POINTS",
        "differences of general quality within so many of the five points make no difference (default: 0.25)",
        float,
    )
    sub.option("--seed S", "of choice, orders and sides (default: 0)", not_negative)
    sub.option(
        "--annotators NAME ...",
        "who may judge, each with a link (default: anybody who types a name)",
        default=[],
    )
    sub.option(
        "--lease MINUTES",
        "after so many a pair that was given out and not judged is free again (default: 30)",
        float,
        default=30.0,
    )
    sub.option(
        "--host HOST",
        "address (default: 127.0.0.1, this machine alone); another one needs --annotators, or a token in "
        "PRB_AUDIT_TOKEN",
        default="127.0.0.1",
    )
    sub.option("--port P", "(default: 8000); 0 picks one", not_negative, default=8000)


def run(options: argparse.Namespace) -> int:
    """Serve the page, or print the report, or export."""
    if options.report or options.export is not None:
        flag = "--report" if options.report else "--export"
        if extra := given_flags(options) - {"--report", "--export"}:
            options.parser.error(f"{min(extra)}: has no effect with {flag}")
    if options.export is not None:
        from prb_jax.auditing.judgements import audit_export

        count = audit_export(options.folder, out=options.export)
        print(f"{count} judgements written to {options.export}")
    elif options.report:
        from prb_jax.auditing.report import audit_report
        from prb_jax.commands.terminal import print_table
        from prb_jax.reports.audit import render_audit

        print_table(render_audit(audit_report(options.folder)))
    else:
        from prb_jax.auditing.audit import INVITATION, audit

        with until_terminated(options):
            call(audit, options, out=options.folder, invitation=os.environ.get(INVITATION) or None)
    return 0
