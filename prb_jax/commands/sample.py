"""`prb sample`: draw texts from a language model for the prompts of a data set."""

import argparse

from prb_jax.commands.arguments import (
    Parser,
    Verbs,
    add_data,
    add_devices,
    add_no_progress,
    add_policy_options,
    add_verb,
    device_options,
    not_negative,
    policy_options,
    positive,
)
from prb_jax.commands.process import start, until_terminated


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "sample",
        run,
        about="draw texts from a language model for the prompts of a data set",
        after_interrupt="the samples so far are kept, and the same command continues the run",
    )
    sub.add_argument("model", metavar="MODEL", help="folder or hub id of a causal language model")
    add_data(sub)
    sub.add_argument(
        "--out", metavar="DIR", required=True, help="run folder: run.json, samples.jsonl, summary.json"
    )
    _add_sampling(sub)
    sub.add_argument(
        "--profile-posts",
        metavar="N",
        type=not_negative,
        default=10,
        help="posts of the user's profile that the model sees (default: 10)",
    )
    sub.add_argument(
        "--max-length",
        metavar="L",
        type=positive,
        help="most tokens of prompt and sample (default: the model's)",
    )
    sub.add_argument("--rows", metavar="N", type=positive, help="samples that are drawn at a time")
    add_devices(sub)
    add_policy_options(sub)
    add_no_progress(sub)


def _add_sampling(sub: Parser) -> None:
    """Add the options that say how texts are drawn; `sampling_options` returns them."""
    sub.add_argument("--n", metavar="N", type=positive, default=1, help="samples of each prompt (default: 1)")
    sub.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=1.0,
        help="0 takes the most probable token (default: 1)",
    )
    sub.add_argument("--top-k", metavar="K", type=not_negative, default=0, help="0 for all tokens (default)")
    sub.add_argument("--top-p", metavar="P", type=float, default=1.0, help="1 for all tokens (default)")
    sub.add_argument("--min-p", metavar="P", type=float, default=0.0, help="0 for all tokens (default)")
    sub.add_argument(
        "--repetition-penalty", metavar="R", type=float, default=1.0, help="1 changes nothing (default)"
    )
    sub.add_argument(
        "--max-new-tokens", metavar="M", type=positive, default=256, help="of a sample (default: 256)"
    )
    sub.add_argument(
        "--stop", metavar="TEXT", nargs="+", action="extend", default=[], help="texts that end a sample"
    )
    sub.add_argument(
        "--stop-id",
        metavar="ID",
        type=not_negative,
        nargs="+",
        action="extend",
        help="tokens that end a sample (default: the model's)",
    )
    sub.add_argument("--seed", metavar="N", type=not_negative, default=0, help="of the draws (default: 0)")


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
