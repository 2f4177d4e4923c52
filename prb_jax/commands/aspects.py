"""`prb aspects`: let a language model write what each user wants from an answer."""

import argparse

from prb_jax.commands.arguments import (
    Parser,
    add_data,
    add_devices,
    add_endpoint,
    add_no_progress,
    add_policy_options,
    device_options,
    endpoint_options,
    not_negative,
    policy_options,
    positive,
)
from prb_jax.commands.process import start, until_terminated


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the texts so far are kept, and the same command continues the run")
    sub.option("[MODEL]", "folder or hub id of a causal language model", dest="planner")
    add_endpoint(sub)
    add_data(sub, about="as of `prb evaluate`; profiles and questions are shown, and nothing else")
    sub.option("--out DIR", "run folder: run.json, aspects.jsonl, summary.json", required=True)
    sub.option("--profile-posts N", "posts of the user that the model sees", not_negative, default=10)
    sub.option("--max-new-tokens N", "of a text", positive, default=200)
    add_devices(sub)
    add_policy_options(sub)
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Write the aspects, and print how many there are."""
    with until_terminated(options):
        if options.endpoint is None:
            start(options)
        from prb_jax.judges.aspects import plan_aspects
        from prb_jax.readouts.load_options import LoadOptions

        result = plan_aspects(
            options.planner,
            options.data,
            out=options.out,
            endpoint=endpoint_options(options),
            loading=LoadOptions(**device_options(options), **policy_options(options)),
            profile_posts=options.profile_posts,
            max_new_tokens=options.max_new_tokens,
            subset=options.subset,
            limit=options.limit,
            progress=not options.no_progress,
        )
    print(f"texts: {result.summary['n']}, of these without a word: {result.summary['empty']}")
    print(f"written to {result.out}")
    return 0
