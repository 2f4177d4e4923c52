"""`prb evaluate`: score comparisons with a model or a baseline."""

import argparse
from typing import Any, Final

from prb_jax.benchmarks import NAMES
from prb_jax.commands.arguments import (
    Parser,
    add_columns,
    add_distributed,
    add_no_progress,
    call,
    keywords,
    not_negative,
    with_columns,
)
from prb_jax.commands.configs import add_config, with_config
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.data.options import options_of
from prb_jax.errors import RunError
from prb_jax.processes.sharing import on_first_process, process_index

UNQUANTIZED: Final = "unquantized"
"""The run folder of the unquantised model, within that of the quantised one."""


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.scoring.evaluate import EvaluateOptions

    sub.set_defaults(after_interrupt="what was scored is kept: the same command continues the run")
    sub.option(
        "[MODEL]",
        "hub id, Hugging Face folder (also at gs:// or s3://), or a baseline: baseline:length, shorter, first, random, "
        "profile-overlap, "
        "popularity, nearest-users; FILE.py:NAME, a function of a comparison; or the URL of a `prb serve`, or of "
        "/classify or /pooling of vLLM or SGLang",
    )
    sub.option(
        "--data NAME_OR_PATH ...",
        f"benchmark NAME or NAME:PATH ({', '.join(NAMES)}), .jsonl(.gz), .json, .csv or .parquet file, folder, "
        "hub data set, personas[:PART]; files and folders also at gs:// and s3://; repeatable",
    )
    add_columns(sub)
    sub.option("--out DIR", "run folder, also at gs:// or s3://: run.json, scores.jsonl, summary.json")
    sub.option(
        "--profile-posts N ...",
        f"{options_of(EvaluateOptions)['view.profile_posts'].meaning}; several numbers are a run each, and a picture "
        "of accuracy by posts",
        not_negative,
        extend=False,
    )
    sub.fields(EvaluateOptions, without="profile_posts")
    sub.option(
        "--no-reference",
        "with --quantize: do not score the same rows with the unquantised model too, and compare",
    )
    add_no_progress(sub)
    add_distributed(sub)
    add_config(sub)
    sub.needed = ("model", "data", "out")


def run(options: argparse.Namespace) -> int:
    """Evaluate, and print the summary."""
    options = with_config(options, options.parser)
    options.data = [with_columns(source, options.columns) for source in options.data]
    with until_terminated(options):
        if options.distributed or not options.model.startswith("baseline:"):
            start(options)
        from prb_jax.scoring.evaluate import evaluate
        from prb_jax.study.posts import evaluate_posts

        posts = options.profile_posts or [None]
        sweep, paired = len(posts) > 1, _compares(options)
        if options.part is not None and (sweep or paired):
            raise RunError(
                "--part: is of one run: give one number with --profile-posts, and --no-reference with --quantize"
            )
        shown = {"profile_posts": posts if sweep else posts[0]}
        score: Any = evaluate_posts if sweep else evaluate
        result = score(**keywords(evaluate, options, **shown))
        compared = None
        if paired:  # the quantised weights are gone by now: both models are never in memory at once
            from prb_jax.reports.comparison import compare

            alone = {"out": result.out / UNQUANTIZED, "controls": "none", "quantize": None, "wandb": None}
            call(evaluate, options, **shown, **alone)
            both = (result.out, result.out / UNQUANTIZED)
            compared = on_first_process(lambda: compare(*both, out=result.out))
    if process_index() == 0 and options.part is not None:
        print(f"part {options.part}: {result.summary['n']:,} rows, written to {result.out}")
    elif process_index() == 0:
        from prb_jax.reports.tables import render_posts, render_summary

        title = " ".join(options.data) + (f", --limit {options.limit}: testing only" if options.limit else "")
        if sweep:
            print_table(render_posts(result.points, title=title))
        else:
            print_table(render_summary({result.summary["model"]: result.summary}, title=title))
        if compared is not None:
            from prb_jax.reports.comparison import render_comparison

            print_table(render_comparison(compared))
        print(f"written to {result.out}")
    return 0


def _compares(options: argparse.Namespace) -> bool:
    """Return whether the unquantised model scores the same rows too, and the two runs are compared."""
    if options.quantize is None and options.no_reference:
        raise RunError("--no-reference: is about a model that is quantised, and needs --quantize")
    if options.quantize is not None and not options.no_reference and len(options.profile_posts or ()) > 1:
        raise RunError(
            "--profile-posts: several numbers score the quantised model alone: give --no-reference with --quantize"
        )
    return options.quantize is not None and not options.no_reference
