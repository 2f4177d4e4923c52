"""`prb correlate`: does a benchmark predict a behaviour?"""

import argparse

from prb_jax.commands.arguments import Verbs, add_verb, not_negative, positive
from prb_jax.commands.terminal import print_table


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "correlate",
        run,
        about="does a benchmark predict a behaviour? correlations with intervals and tests",
    )
    sub.add_argument(
        "--scores",
        metavar="RUN",
        nargs="+",
        required=True,
        help="runs of `prb evaluate`, one for each reward model",
    )
    sub.add_argument(
        "--behaviour",
        metavar="RUN",
        nargs="+",
        required=True,
        help="runs of `prb best-of-n`, `prb policy-accuracy`, `prb guide`, `prb ppo` with watch.gold",
    )
    sub.add_argument("--out", metavar="DIR", help="folder for correlate.json and correlate.png")
    sub.add_argument("--lineage", metavar="FILE", help="JSON, {name of a score run: lineage}")
    sub.add_argument(
        "--figures",
        metavar="F",
        nargs="+",
        help="of the benchmark, as accuracy or user_accuracy (default: all)",
    )
    sub.add_argument(
        "--quantile", metavar="Q", type=float, default=0.1, help="over users and subsets (default: 0.1)"
    )
    sub.add_argument(
        "--draws", metavar="N", type=positive, default=2000, help="of users and models (default: 2000)"
    )
    sub.add_argument("--seed", metavar="N", type=not_negative, default=0, help="of the draws (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Correlate, and print the tables."""
    from prb_jax.reports.correlation import CORRELATE, correlate
    from prb_jax.reports.correlation_shown import PICTURE, render_correlation

    found = correlate(
        options.scores,
        options.behaviour,
        out=options.out,
        lineage=options.lineage,
        figures=options.figures,
        quantile=options.quantile,
        draws=options.draws,
        seed=options.seed,
    )
    print_table(render_correlation(found))
    if options.out is not None:
        print(f"written to {options.out}/{CORRELATE} and {PICTURE}")
    return 0
