"""Verbs that make a benchmark with people: `prb build` from their own wishes, `prb audit` from their judgements."""

import argparse
import os

from prb_jax.commands.arguments import Parser, call, given_flags
from prb_jax.commands.configs import add_configured, given_config, show_config
from prb_jax.commands.process import print_table, start
from prb_jax.commands.values import not_negative, positive


def add(sub: Parser) -> None:
    add_configured(
        sub,
        config="endpoint",
        overrides="data=FILE generator.endpoint=URL generator.name=NAME writing.candidates=8",
        out="run.json, rows.jsonl, pairs.jsonl, public, private",
        kept="all written rows are kept, and the same command continues the build",
        distributed=False,
    )
    sub.option("--aspects", "Derive missing aspects from the narrative of a record")
    sub.option("--redact", "First replace e-mail addresses, accounts and numbers (requires scrubadub)")
    about = "Let a gate fail; the card always mentions it"
    sub.add_argument("--relax", metavar="GATE", action="append", default=[], help=about)


def run(options: argparse.Namespace) -> None:
    """Build, and print the verdict of every gate."""
    config, overrides = given_config(options)
    overrides += [f"{name}=true" for name in ("aspects", "redact") if getattr(options, name)]
    if options.show_config:
        from prb_jax.building.settings import load_build_settings

        show_config(load_build_settings, config, overrides, relax=options.relax)
        return
    start(options)
    from prb_jax.building.build import build

    result = call(build, options, config=config, overrides=overrides)
    summary = result.summary
    print(f"{'gate':<16}{'before':>8}{'after':>8}{'dropped':>9}")
    for gate in summary["gates"]:
        before, after = (_shown(gate[when]) for when in ("before", "after"))
        told = {"passed": "", "failed": "  FAILED", "leak found": "  FAILED"}
        verdict = told.get(gate["verdict"], f"  {gate['verdict']}") + ("  relaxed" if gate["relaxed"] else "")
        print(f"{gate['gate']:<16}{before:>8}{after:>8}{gate['dropped']:>9}{verdict}")
    parts = ", ".join(f"{count:,} {name}" for name, count in summary["parts"].items())
    print(f"{summary['pairs']:,} pairs of {summary['records']:,} records ({parts})")
    evaluation = f"prb evaluate MODEL --data {result.out}/public.jsonl --out ..."
    print(f"written to {result.out}; `{evaluation}` evaluates on it")


def _shown(figure: dict | None) -> str:
    return "-" if figure is None or figure["value"] is None else f"{figure['value']:.3f}"


def add_audit(sub: Parser) -> None:
    sub.set_defaults(after_interrupt="every submitted judgement is kept; the same command continues")
    sub.option("DIR", "Folder of the audit", dest="folder")
    what = sub.add_mutually_exclusive_group()
    about = "Print the figures so far, and write them to report.json"
    what.add_argument("--report", action="store_true", help=about)
    what.add_argument("--export", metavar="FILE", help="Write the judgements so far, as .jsonl or .csv")
    sub.option("--out FILE", "Page to write with --report, e.g. page.html")
    sub.data(about="Pairs, see `prb evaluate`; required for a new audit", required=False)
    sub.option("--gold NAME_OR_PATH ...", "Pairs with a certain personal fit, for attention checks")
    sub.option("--sample N", "Draw N of the pairs at random", positive)
    sub.option("--per-item N", "People who judge each pair (default: 3)", positive)
    sub.option(
        "--check-every N",
        "Check attention once in N judgements: a gold or repeated pair (default: 10; 0: none)",
        not_negative,
    )
    sub.option(
        "--margin POINTS",
        "Largest difference of general quality, in points of five, that counts as none (default: 0.25)",
        float,
    )
    sub.option("--seed S", "Seed of sample, orders and sides (default: 0)", not_negative)
    about = "People who may judge, each with a link (default: anybody who types a name)"
    sub.option("--annotators NAME ...", about, default=[])
    about = "Minutes after which an assigned but unjudged pair is free again (default: 30)"
    sub.option("--lease MINUTES", about, float, default=30.0)
    sub.option(
        "--host HOST",
        "Address (default: 127.0.0.1, only this machine); others require --annotators or a token in "
        "PRB_AUDIT_TOKEN",
        default="127.0.0.1",
    )
    sub.option("--port P", "Port (default: 8000); 0 picks a free one", not_negative, default=8000)


def run_audit(options: argparse.Namespace) -> None:
    """Serve the page on which people judge, or print the report, or export the judgements."""
    if options.report or options.export is not None:
        flag = "--report" if options.report else "--export"
        used = {"--report", "--out"} if options.report else {"--export"}
        if extra := given_flags(options) - used:
            options.parser.error(f"{min(extra)}: has no effect with {flag}")
    if options.export is not None:
        from prb_jax.building.auditing.judgements import audit_export

        count = audit_export(options.folder, out=options.export)
        print(f"{count} judgements written to {options.export}")
    elif options.report:
        from prb_jax.building.auditing.report import audit_report
        from prb_jax.reports.audit import render_audit

        print_table(render_audit(audit_report(options.folder, out=options.out)))
        if options.out is not None:
            print(f"written to {options.out}")
    elif options.out is not None:
        options.parser.error("--out: is the page of a report; add --report")
    else:
        from prb_jax.building.auditing.audit import INVITATION, audit

        call(audit, options, out=options.folder, invitation=os.environ.get(INVITATION) or None)
