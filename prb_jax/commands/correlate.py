"""`prb correlate`: does a benchmark predict a behaviour?"""

import argparse

from prb_jax.commands.arguments import Parser, not_negative, picked, positive
from prb_jax.commands.terminal import print_table


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option(
        "--scores RUN ...", "runs of `prb evaluate`, one for each reward model", required=True, extend=False
    )
    sub.option(
        "--behaviour RUN ...",
        "runs of `prb best-of-n`, `prb policy-accuracy`, `prb guide`, `prb ppo` with watch.gold",
        required=True,
        extend=False,
    )
    sub.option("--out DIR", "folder for correlate.json and correlate.png")
    sub.option("--lineage FILE", "JSON, {name of a score run: lineage}")
    sub.option(
        "--figures F ...", "of the benchmark, as accuracy or user_accuracy (default: all)", extend=False
    )
    sub.option("--quantile Q", "over users and subsets", float, default=0.1)
    sub.option("--draws N", "of users and models", positive, default=2000)
    sub.option("--seed N", "of the draws", not_negative, default=0)


def run(options: argparse.Namespace) -> int:
    """Correlate, and print the tables."""
    from prb_jax.reports.correlation import CORRELATE, correlate
    from prb_jax.reports.correlation_shown import PICTURE, render_correlation

    found = correlate(
        options.scores,
        options.behaviour,
        out=options.out,
        **picked(options, "lineage figures quantile draws seed"),
    )
    print_table(render_correlation(found))
    if options.out is not None:
        print(f"written to {options.out}/{CORRELATE} and {PICTURE}")
    return 0
