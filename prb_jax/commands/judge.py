"""`prb judge`: let a language model choose between two responses."""

import argparse

from prb_jax.commands.arguments import (
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
from prb_jax.commands.terminal import print_table
from prb_jax.text.protocol import PROTOCOLS


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "judge",
        run,
        about="let a language model choose between two responses, and evaluate its verdicts",
        after_interrupt="the judgements so far are kept, and the same command continues the run",
    )
    sub.add_argument("judge", metavar="MODEL", nargs="?", help="folder or hub id of a causal language model")
    sub.add_argument(
        "--endpoint",
        metavar="URL",
        help="instead: an API like OpenAI's, as https://HOST/v1; its key is read from PRB_ENDPOINT_KEY",
    )
    sub.add_argument("--model", metavar="NAME", help="of the model at the endpoint")
    sub.add_argument(
        "--concurrency", metavar="N", type=positive, default=8, help="requests at a time (default: 8)"
    )
    sub.add_argument(
        "--price",
        metavar="DOLLARS",
        type=float,
        nargs=2,
        help="of a million tokens of prompts and of replies, for the cost in summary.json",
    )
    add_data(sub, about="as of `prb evaluate`; comparisons of two responses")
    sub.add_argument("--out", metavar="DIR", required=True, help="run folder, as of `prb evaluate`")
    sub.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        default="default",
        help="default: both orders; paper: one order by a seeded coin, a reply without a verdict counts as A",
    )
    sub.add_argument(
        "--prompts", metavar="DIR", help="with --protocol paper: the prompts in a checkout of its scripts"
    )
    sub.add_argument(
        "--reason", action="store_true", help="the judge thinks in words first (default: one letter)"
    )
    sub.add_argument(
        "--profile-posts",
        metavar="N",
        type=not_negative,
        help="posts of the user that the judge sees (default: 10, and 0 for the paper protocol)",
    )
    sub.add_argument("--max-length", metavar="L", type=positive, help="longest conversation in tokens")
    add_devices(sub)
    add_policy_options(sub)
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Judge, and print the summary."""
    with until_terminated(options):
        if options.endpoint is None:
            start(options)
        from prb_jax.generation.judge_run import JudgeOptions, endpoint_options, judge
        from prb_jax.readouts.load_options import LoadOptions
        from prb_jax.reports.table import render_summary

        names = ("protocol", "reason", "prompts", "profile_posts", "max_length")
        result = judge(
            options.judge,
            options.data,
            out=options.out,
            options=JudgeOptions(**{name: getattr(options, name) for name in names}),
            endpoint=endpoint_options(
                options.endpoint, options.model, concurrency=options.concurrency, price=options.price
            ),
            loading=LoadOptions(**device_options(options), **policy_options(options)),
            subset=options.subset,
            limit=options.limit,
            progress=not options.no_progress,
            command=options.command,
        )
    print_table(render_summary({result.summary["model"]: result.summary}, title=" ".join(options.data)))
    for name, value in result.summary["judge"].items():
        print(
            f"{name.replace('_', ' ')}: {value:.4f}"
            if isinstance(value, float)
            else f"{name.replace('_', ' ')}: {value}"
        )
    print(f"written to {result.out}")
    return 0
