"""`prb build`: a personalised benchmark from people's own wishes."""

import argparse

from prb_jax.commands.arguments import Parser, call
from prb_jax.commands.configs import add_configured, given_config, show_config
from prb_jax.commands.process import start, until_terminated


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="what was written is kept, and the same command continues the build")
    add_configured(
        sub,
        config="endpoint",
        overrides="data=FILE generator.endpoint=URL generator.name=NAME writing.candidates=8",
        out="run.json, rows.jsonl, pairs.jsonl, public, private",
    )
    sub.option("--aspects", "derive aspects from the narrative of records without any")
    sub.option("--redact", "replace e-mail addresses, accounts and numbers first (needs scrubadub)")
    sub.add_argument(
        "--relax",
        metavar="GATE",
        action="append",
        default=[],
        help="let a gate fail; the card says so for ever",
    )


def run(options: argparse.Namespace) -> int:
    """Build, and print what every gate says."""
    config, overrides = given_config(options)
    overrides += [f"{name}=true" for name in ("aspects", "redact") if getattr(options, name)]
    if options.show_config:
        from prb_jax.building.settings import load_build_settings

        return show_config(load_build_settings, config, overrides, relax=options.relax)
    with until_terminated(options):
        start(options)
        from prb_jax.building.build import build

        result = call(build, options, config=config, overrides=overrides)
    found = result.summary
    print(f"{'gate':<16}{'before':>8}{'after':>8}{'dropped':>9}")
    for gate in found["gates"]:
        before, after = (_shown(gate[when]) for when in ("before", "after"))
        state = {"passed": "", "failed": "  FAILED", "leak found": "  FAILED"}.get(
            gate["verdict"], f"  {gate['verdict']}"
        )
        relaxed = "  relaxed" if gate["relaxed"] else ""
        print(f"{gate['gate']:<16}{before:>8}{after:>8}{gate['dropped']:>9}{state}{relaxed}")
    parts = ", ".join(f"{count:,} {name}" for name, count in found["parts"].items())
    print(f"{found['pairs']:,} pairs of {found['records']:,} records ({parts})")
    print(
        f"written to {result.out}; `prb evaluate MODEL --data {result.out}/public.jsonl --out ...` evaluates on it"
    )
    return 0


def _shown(figure: dict | None) -> str:
    return "-" if figure is None or figure["value"] is None else f"{figure['value']:.3f}"
