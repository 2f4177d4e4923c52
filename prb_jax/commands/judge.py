"""`prb judge`: let a language model choose between two responses, or rate each."""

import argparse

from prb_jax.commands.arguments import (
    DEVICES,
    READER,
    Parser,
    add_aspects,
    add_data,
    add_endpoint,
    add_no_progress,
    chosen,
    endpoint_options,
    not_negative,
    picked,
    positive,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring import CONTROLS, NO_CONTROLS
from prb_jax.text.protocol import PROTOCOLS

_RATING = ("score", "rubric", "paper-score", "paper-rubric")


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the judgements so far are kept, and the same command continues the run")
    sub.option("[MODEL]", "folder or hub id of a causal language model", dest="judge")
    add_endpoint(sub)
    add_data(
        sub, about="as of `prb evaluate`; comparisons of two responses, but for those that rate each response"
    )
    sub.option("--out DIR", "run folder, as of `prb evaluate`", required=True)
    sub.option(
        "--protocol",
        "default: both orders; paper: one order by a seeded coin, a reply without a verdict counts as A; score: "
        "a number for each response by itself; rubric: 0, 1 or 2 for each aspect of the true rubric (an upper bound); "
        "paper-score, paper-rubric: these two as the scripts of Personalised RewardBench ask",
        default="default",
        choices=(*PROTOCOLS, *_RATING),
    )
    sub.option(
        "--template FILE",
        "with --protocol score: the text that asks for the number, with the places {prompt} and {answer}; with "
        "rubric {answer} and {aspect}, with paper-score {question}, {profile} and {answer}",
    )
    sub.option("--system FILE", "with --protocol score or rubric: the text of a system turn")
    sub.add_argument(
        "--scale",
        metavar=("LOW", "HIGH"),
        type=int,
        nargs=2,
        help="with --protocol score: the numbers (default: 1 9)",
    )
    sub.option(
        "--top-logprobs N",
        "with --protocol score or rubric and --endpoint: the expected number of the N most probable tokens, "
        "instead of the number in the reply",
        positive,
    )
    sub.option(
        "--min-mass P",
        "with --protocol default and a MODEL without --reason: no verdict where A and B together are less "
        "probable than this among all tokens (default: 0.1)",
        float,
    )
    sub.option("--prompts DIR", "with the paper's protocols: the prompts in a checkout of its scripts")
    sub.option("--reason", "the judge thinks in words first (default: one letter or number)")
    sub.option(
        "--profile-posts N",
        "posts of the user that the judge sees (default: 10, and 0 for paper, rubric and paper-rubric)",
        not_negative,
    )
    sub.option(
        "--persona FILE|narrative",
        "a .jsonl file of {user_id, text} that the judge is told; or the narrative of the data: an upper bound",
    )
    sub.option(
        "--shots K",
        "the latest K earlier comparisons of the same user, with the user's choices",
        not_negative,
        default=0,
    )
    sub.option(
        "--history NAME_OR_PATH ...",
        "with --shots: labelled comparisons of which these are taken (default: those before it in the data)",
    )
    add_aspects(sub)
    sub.option(
        "--controls",
        "ask again without anything of the user (blind), with another user's (swap), both (all), or not (default)",
        default=NO_CONTROLS,
        choices=CONTROLS,
    )
    sub.option("--seed N", "of --controls swap", not_negative, default=0)
    sub.option("--max-length L", "longest conversation in tokens", positive)
    sub.fields(LoadOptions, DEVICES)
    sub.fields(LoadOptions, READER)
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Judge, and print the summary."""
    with until_terminated(options):
        if options.endpoint is None:
            start(options)
        from prb_jax.judges.judge import judge
        from prb_jax.judges.options import JudgeOptions
        from prb_jax.reports.tables import render_summary
        from prb_jax.scoring.prompt_extras import PromptExtras

        result = judge(
            options.judge,
            options.data,
            out=options.out,
            options=JudgeOptions(
                **picked(
                    options, "protocol reason prompts template system top_logprobs profile_posts max_length"
                ),
                **picked(options, "min_mass controls seed"),
                hints=PromptExtras(**picked(options, "aspects persona shots history")),
                scale=None if options.scale is None else (options.scale[0], options.scale[1]),
            ),
            endpoint=endpoint_options(options),
            loading=chosen(options, LoadOptions),
            subset=options.subset,
            limit=options.limit,
            progress=not options.no_progress,
        )
    print_table(render_summary({result.summary["model"]: result.summary}, title=" ".join(options.data)))
    for name, value in result.summary["judge"].items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' ')}: {shown}")
    print(f"written to {result.out}")
    return 0
