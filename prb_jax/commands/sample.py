"""`prb sample`: draw texts from a language model for the prompts of a data set."""

import argparse

from prb_jax.commands.arguments import (
    Parser,
    add_data,
    add_endpoint,
    add_no_progress,
    add_part,
    add_prompt,
    call,
    chosen,
    endpoint_options,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.errors import counted
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.generation.rules import SampleOptions

    sub.set_defaults(after_interrupt="the samples so far are kept, and the same command continues the run")
    sub.option(
        "[MODEL]", "folder (also at gs:// or s3://) or hub id of a causal language model", dest="policy"
    )
    add_endpoint(sub)
    add_data(sub)
    sub.option("--out DIR", "run folder: run.json, samples.jsonl, summary.json", required=True)
    sub.fields(SampleOptions)
    add_prompt(sub, of="model", rows="sample")
    sub.fields(LoadOptions, without="readout")
    add_part(sub, "draw")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Sample, and print how much was drawn."""
    with until_terminated(options):
        if options.endpoint is None:
            start(options)
        from prb_jax.generation.rules import SampleOptions
        from prb_jax.generation.sample import sample_data

        result = call(
            sample_data,
            options,
            model=options.policy,
            options=chosen(options, SampleOptions),
            endpoint=endpoint_options(options),
            loading=chosen(options, LoadOptions),
        )
    found = result.summary
    if options.part is not None:
        print(f"part {options.part}: {counted(found['n'], 'sample')}, written to {result.out}")
        return 0
    ends = ", ".join(f"{name} {count:,}" for name, count in sorted(found["finish"].items()))
    tokens = "" if found["mean_tokens"] is None else f", {found['mean_tokens']:.1f} tokens a sample"
    print(f"{found['n']:,} prompts, {found['samples']} samples of each{tokens}; ended by: {ends}")
    dropped = found["posts_dropped"]
    if dropped and dropped["prompts"]:
        print(
            f"{counted(dropped['prompts'], 'prompt')} lost {counted(dropped['posts'], 'post')} that did not fit"
        )
    print(f"written to {result.out}")
    return 0
