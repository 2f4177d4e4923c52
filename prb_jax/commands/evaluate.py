"""`prb evaluate`: score comparisons with a model or a baseline."""

import argparse
from pathlib import Path
from typing import Any, Final

from prb_jax.benchmarks import NAMES
from prb_jax.commands.arguments import (
    REWARD_MODEL,
    Parser,
    add_aspects,
    add_columns,
    add_distributed,
    add_history,
    add_no_progress,
    not_negative,
    picked,
    positive,
    with_columns,
)
from prb_jax.commands.config_option import add_config, with_config
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.errors import RunError
from prb_jax.processes.sharing import on_first_process, process_index
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring import CONTROLS, TOO_LONG
from prb_jax.text.view import ViewOptions

UNQUANTIZED: Final = "unquantized"
"""The run folder of the unquantised model, within that of the quantised one."""


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="what was scored is kept: the same command continues the run")
    sub.option(
        "[MODEL]",
        "hub id, Hugging Face folder, or a baseline: baseline:length, shorter, first, random, profile-overlap, "
        "popularity, nearest-users",
    )
    sub.option(
        "--data NAME_OR_PATH ...",
        f"benchmark NAME or NAME:PATH ({', '.join(NAMES)}), .jsonl(.gz), .json, .csv or .parquet file, folder, "
        "hub data set, personas[:PART]; repeatable",
    )
    add_columns(sub)
    sub.option("--out DIR", "run folder: run.json, scores.jsonl, summary.json")
    sub.option("--subset S", "one subset of the data")
    sub.option(
        "--profile-posts N ...",
        "posts of the user's profile that the model sees (default: as in training; where the model does not "
        "say, 10, and 0 for the paper protocol); several numbers are a run each, and a picture of accuracy by posts",
        not_negative,
        extend=False,
    )
    sub.fields(ViewOptions, "protocol max_length")
    sub.option(
        "--too-long",
        "what a response is that leaves no room for its prompt within that: an error (default), or left out, "
        "counted in summary.json and named in left_out.jsonl",
        default="error",
        choices=TOO_LONG,
    )
    sub.option(
        "--controls",
        "the same model without the profile (blind), with another user's (swap), both (all), or none of these "
        "(default: blind where the model sees a profile)",
        choices=CONTROLS,
    )
    add_history(sub, otherwise="each user's comparisons before the one in question")
    add_aspects(sub)
    sub.fields(LoadOptions, "dtype")
    sub.fields(LoadOptions, "quantize attention")
    sub.option(
        "--no-reference",
        "with --quantize: do not score the same rows with the unquantised model too, and compare",
    )
    sub.fields(LoadOptions, "mesh")
    sub.option("--limit N", "the first N comparisons of each source; for testing only", positive)
    sub.option("--batch-tokens N", "tokens computed at a time", positive)
    sub.fields(LoadOptions, REWARD_MODEL)
    sub.option(
        "--seed N",
        "of the resampling of benchmark scores and of --controls swap",
        not_negative,
        default=0,
    )
    sub.option("--wandb PROJECT", "write the summary to this project of Weights & Biases too")
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
        from prb_jax.scoring.posts import evaluate_posts

        posts = options.profile_posts or [None]
        sweep = len(posts) > 1
        paired = _compares(options, sweep=sweep)
        score: Any = evaluate_posts if sweep else evaluate
        choices = {
            **picked(options, "protocol max_length too_long history aspects subset limit seed"),
            **picked(options, "mesh dtype attention batch_tokens"),
            **picked(options, REWARD_MODEL),
            "profile_posts": posts if sweep else posts[0],
            "progress": not options.no_progress,
        }
        result = score(
            options.model,
            options.data,
            out=options.out,
            **picked(options, "controls quantize wandb"),
            **choices,
        )
        compared = None
        if paired:  # the quantised weights are gone by now: both models are never in memory at once
            evaluate(options.model, options.data, out=result.out / UNQUANTIZED, controls="none", **choices)
            compared = on_first_process(lambda: _compare(result.out))
    if process_index() == 0:
        title = " ".join(options.data) + (f", --limit {options.limit}: testing only" if options.limit else "")
        print_table(_table(result, title=title))
        if compared is not None:
            print_table(_comparison(compared))
        print(f"written to {result.out}")
    return 0


def _compares(options: argparse.Namespace, *, sweep: bool) -> bool:
    """Return whether the unquantised model scores the same rows too, and the two runs are compared."""
    if options.quantize is None:
        if options.no_reference:
            raise RunError("--no-reference: is about a model that is quantised, and needs --quantize")
        return False
    if sweep and not options.no_reference:
        raise RunError(
            "--profile-posts: several numbers score the quantised model alone: give --no-reference with --quantize"
        )
    return not options.no_reference


def _compare(out: Path) -> dict[str, Any]:
    from prb_jax.reports.comparison import compare

    return compare(out, out / UNQUANTIZED, out=out)


def _comparison(compared: dict[str, Any]) -> object:
    from prb_jax.reports.comparison import render_comparison

    return render_comparison(compared)


def _table(result: Any, *, title: str) -> object:
    from prb_jax.reports.tables import render_posts, render_summary
    from prb_jax.scoring.posts import PostsSweep

    if isinstance(result, PostsSweep):
        return render_posts(result.points, title=title)
    return render_summary({result.summary["model"]: result.summary}, title=title)
