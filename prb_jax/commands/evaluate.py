"""`prb evaluate`, which scores comparisons with a model or a baseline, and `prb merge` of the parts of a run."""

import argparse
import shlex
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from prb_jax.commands.arguments import Parser, chosen, not_negative, with_columns
from prb_jax.commands.configs import with_config
from prb_jax.commands.process import print_table, start
from prb_jax.errors import RunError, printable
from prb_jax.platform.processes.sharing import on_first_process, process_index
from prb_jax.records.benchmarks import NAMES
from prb_jax.records.options import options_of

_POSTS: Final = "prb_jax.study.posts"
_COMPARISON: Final = "prb_jax.reports.comparison"
"""Modules that one evaluation may not need, imported on first use."""

_UNQUANTIZED: Final = "unquantized"
"""The run folder of the unquantised model, within that of the quantised one."""


def add(sub: Parser) -> None:
    from prb_jax.scoring.options import EvaluateOptions

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
    sub.columns()
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
    sub.long_run("what was scored is kept: the same command continues the run")
    sub.option(
        "--config FILE",
        "Python file whose get_config() returns these options ({'model': PATH, 'profile_posts': 3, ...}); what the "
        "command line says comes before it",
    )
    sub.needed = ("model", "data", "out")


def run(options: argparse.Namespace) -> None:
    """Evaluate, and print the summary."""
    options = with_config(options, options.parser)
    options.data = [with_columns(source, options) for source in options.data]
    if options.distributed or not options.model.startswith("baseline:"):
        start(options)
    from prb_jax.scoring.evaluate import run_evaluation
    from prb_jax.scoring.options import EvaluateOptions

    posts = options.profile_posts or [None]
    sweep, paired = len(posts) > 1, _compares(options)
    if options.part is not None and (sweep or paired):
        raise RunError(
            "--part: is of one run: give one number with --profile-posts, and --no-reference with --quantize"
        )
    shown = {"out": options.out, "progress": not options.no_progress, "profile_posts": posts[0]}
    asked = chosen(options, EvaluateOptions, **shown)
    if sweep:
        result: Any = import_module(_POSTS).run_posts(options.model, options.data, posts, asked)
    else:
        result = run_evaluation(options.model, options.data, asked)
    compared = None
    if paired:  # the quantised weights are gone by now: both models are never in memory at once
        both = (result.out, result.out / _UNQUANTIZED)
        loading = replace(asked.loading, quantize=None)
        alone = replace(asked, out=both[1], controls="none", loading=loading, wandb=None)
        run_evaluation(options.model, options.data, alone)
        reports = import_module(_COMPARISON)
        compared = reports.render_comparison(on_first_process(lambda: reports.compare(*both, out=result.out)))
    if process_index() > 0:
        return
    if options.part is not None:
        print(f"part {options.part}: {result.summary['n']:,} rows, written to {result.out}")
        return
    from prb_jax.reports.summary import render_posts, render_summary  # rich takes long to import

    title = " ".join(options.data) + (f", --limit {options.limit}: testing only" if options.limit else "")
    if sweep:
        print_table(render_posts(result.points, title=title))
    else:
        print_table(render_summary({result.summary["model"]: result.summary}, title=title))
    if compared is not None:
        print_table(compared)
    print(f"written to {result.out}")


def _compares(options: argparse.Namespace) -> bool:
    """Return whether the unquantised model scores the same rows too, and the two runs are compared."""
    if options.quantize is None and options.no_reference:
        raise RunError("--no-reference: is about a model that is quantised, and needs --quantize")
    if options.quantize is not None and not options.no_reference and len(options.profile_posts or ()) > 1:
        raise RunError(
            "--profile-posts: several numbers score the quantised model alone: give --no-reference with --quantize"
        )
    return options.quantize is not None and not options.no_reference


def add_merge(sub: Parser) -> None:
    sub.set_defaults(after_interrupt="the parts are as they were: repeat the command")
    sub.option("PART ...", "folders of all parts of a command with `--part I/N`, in any order", dest="parts")
    sub.option("--out DIR", "run folder, as of the command of the parts", required=True)


def run_merge(options: argparse.Namespace) -> None:
    """Merge the rows, and print the command that finishes the run."""
    from prb_jax.records.reading import read_object
    from prb_jax.runs.kind import RUN
    from prb_jax.runs.merging import merge

    merged = merge(options.parts, out=options.out)
    command = read_object(merged / RUN, error=RunError).get("command")
    print(f"the rows of {len(options.parts)} parts are in {options.out}; nothing is left to compute")
    if command:
        print(
            f"the command of the parts, without --part, finishes the run:\n  {printable(shlex.join(command))}"
        )
    else:
        print("the parts were made from Python: make the same call, without part and with this folder as out")
