"""`prb sample`: draw texts from a language model for the prompts of a data set."""

import argparse

from prb_jax.commands.arguments import (
    Parser,
    add_data,
    add_devices,
    add_no_progress,
    add_policy_options,
    device_options,
    not_negative,
    policy_options,
    positive,
)
from prb_jax.commands.process import start, until_terminated


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the samples so far are kept, and the same command continues the run")
    sub.option("MODEL", "folder or hub id of a causal language model")
    add_data(sub)
    sub.option("--out DIR", "run folder: run.json, samples.jsonl, summary.json", required=True)
    _add_sampling(sub)
    sub.option(
        "--profile-posts N",
        "posts of the user's profile that the model sees",
        not_negative,
        default=10,
    )
    sub.option("--max-length L", "most tokens of prompt and sample (default: the model's)", positive)
    sub.option("--rows N", "samples that are drawn at a time", positive)
    add_devices(sub)
    add_policy_options(sub)
    add_no_progress(sub)


def _add_sampling(sub: Parser) -> None:
    """Add the options that say how texts are drawn; `sampling_options` returns them."""
    sub.option("--n N", "samples of each prompt", positive, default=1)
    sub.option("--temperature T", "0 takes the most probable token", float, default=1.0)
    sub.option("--top-k K", "0 for all tokens (default)", not_negative, default=0)
    sub.option("--top-p P", "1 for all tokens (default)", float, default=1.0)
    sub.option("--min-p P", "0 for all tokens (default)", float, default=0.0)
    sub.option("--repetition-penalty R", "1 changes nothing (default)", float, default=1.0)
    sub.option("--max-new-tokens M", "of a sample", positive, default=256)
    sub.option("--stop TEXT ...", "texts that end a sample", default=[])
    sub.option("--stop-id ID ...", "tokens that end a sample (default: the model's)", not_negative)
    sub.option("--seed N", "of the draws", not_negative, default=0)


def run(options: argparse.Namespace) -> int:
    """Sample, and print how much was drawn."""
    with until_terminated(options):
        start(options)
        from prb_jax.generation.choose import SampleOptions
        from prb_jax.generation.sample import sample_data
        from prb_jax.readouts.load_options import LoadOptions

        chosen = SampleOptions(
            n=options.n,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            max_new_tokens=options.max_new_tokens,
            stop=tuple(options.stop),
            stop_ids=None if options.stop_id is None else tuple(options.stop_id),
            seed=options.seed,
        )
        loading = LoadOptions(**device_options(options), **policy_options(options))
        result = sample_data(
            options.model,
            options.data,
            out=options.out,
            options=chosen,
            loading=loading,
            profile_posts=options.profile_posts,
            max_length=options.max_length,
            subset=options.subset,
            limit=options.limit,
            rows=options.rows,
            progress=not options.no_progress,
        )
    found = result.summary
    ends = ", ".join(f"{name} {count:,}" for name, count in sorted(found["finish"].items()))
    print(
        f"{found['n']:,} prompts, {found['samples']} samples of each, {found['mean_tokens']:.1f} tokens a sample; "
        f"ended by: {ends}"
    )
    if found["posts_dropped"]["prompts"]:
        dropped = found["posts_dropped"]
        print(f"{dropped['prompts']:,} prompts lost {dropped['posts']:,} posts that did not fit")
    print(f"written to {result.out}")
    return 0
