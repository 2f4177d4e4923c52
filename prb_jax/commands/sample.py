"""`prb sample`: draw texts from a language model for the prompts of a data set."""

import argparse

from prb_jax.commands.arguments import Parser, add_data, add_no_progress, add_prompt, call, chosen
from prb_jax.commands.process import start, until_terminated
from prb_jax.errors import counted
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.generation.choose import SampleOptions

    sub.set_defaults(after_interrupt="the samples so far are kept, and the same command continues the run")
    sub.option("MODEL", "folder or hub id of a causal language model")
    add_data(sub)
    sub.option("--out DIR", "run folder: run.json, samples.jsonl, summary.json", required=True)
    sub.fields(SampleOptions)
    add_prompt(sub, of="model", rows="sample")
    sub.fields(LoadOptions, without="readout")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Sample, and print how much was drawn."""
    with until_terminated(options):
        start(options)
        from prb_jax.generation.choose import SampleOptions
        from prb_jax.generation.sample import sample_data

        drawing, loading = chosen(options, SampleOptions), chosen(options, LoadOptions)
        result = call(sample_data, options, options=drawing, loading=loading)
    found = result.summary
    ends = ", ".join(f"{name} {count:,}" for name, count in sorted(found["finish"].items()))
    print(
        f"{found['n']:,} prompts, {found['samples']} samples of each, {found['mean_tokens']:.1f} tokens a sample; "
        f"ended by: {ends}"
    )
    if found["posts_dropped"]["prompts"]:
        dropped = found["posts_dropped"]
        print(
            f"{counted(dropped['prompts'], 'prompt')} lost {counted(dropped['posts'], 'post')} that did not fit"
        )
    print(f"written to {result.out}")
    return 0
