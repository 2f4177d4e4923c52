"""`prb aspects`: let a language model write what each user wants from an answer."""

import argparse

from prb_jax.commands.arguments import (
    Parser,
    add_data,
    add_endpoint,
    add_no_progress,
    call,
    chosen,
    endpoint_options,
    not_negative,
    positive,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the texts so far are kept, and the same command continues the run")
    sub.option("[MODEL]", "folder or hub id of a causal language model", dest="planner")
    add_endpoint(sub)
    add_data(sub, about="as of `prb evaluate`; profiles and questions are shown, and nothing else")
    sub.option("--out DIR", "run folder: run.json, aspects.jsonl, summary.json", required=True)
    sub.option("--profile-posts N", "posts of the user that the model sees", not_negative, default=10)
    sub.option("--max-new-tokens N", "of a text", positive, default=200)
    sub.fields(LoadOptions, without="readout")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Write the aspects, and print how many there are."""
    with until_terminated(options):
        if options.endpoint is None:
            start(options)
        from prb_jax.judges.aspects import plan_aspects

        endpoint, loading = endpoint_options(options), chosen(options, LoadOptions)
        result = call(plan_aspects, options, model=options.planner, endpoint=endpoint, loading=loading)
    print(f"texts: {result.summary['n']}, of these without a word: {result.summary['empty']}")
    print(f"written to {result.out}")
    return 0
