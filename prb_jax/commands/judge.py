"""`prb judge`: let a language model choose between two responses, or rate each."""

import argparse

from prb_jax.commands.arguments import (
    Parser,
    add_data,
    add_endpoint,
    add_no_progress,
    add_part,
    call,
    chosen,
    endpoint_options,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.judges.options import JudgeOptions

    sub.set_defaults(after_interrupt="the judgements so far are kept, and the same command continues the run")
    sub.option("[MODEL]", "folder or hub id of a causal language model", dest="judge")
    add_endpoint(sub)
    add_data(
        sub, about="as of `prb evaluate`; comparisons of two responses, but for those that rate each response"
    )
    sub.option("--out DIR", "run folder, as of `prb evaluate`", required=True)
    sub.fields(JudgeOptions)
    sub.fields(LoadOptions, without="readout")
    add_part(sub, "judge")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Judge, and print the summary."""
    with until_terminated(options):
        if options.endpoint is None:
            start(options)
        from prb_jax.judges.judge import judge
        from prb_jax.judges.options import JudgeOptions
        from prb_jax.reports.tables import render_summary

        result = call(
            judge,
            options,
            model=options.judge,
            options=chosen(options, JudgeOptions),
            endpoint=endpoint_options(options),
            loading=chosen(options, LoadOptions),
        )
    if options.part is not None:
        print(f"part {options.part}: {result.summary['n']:,} judgements, written to {result.out}")
        return 0
    print_table(render_summary({result.summary["model"]: result.summary}, title=" ".join(options.data)))
    for name, value in result.summary["judge"].items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' ')}: {shown}")
    print(f"written to {result.out}")
    return 0
