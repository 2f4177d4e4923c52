"""`prb evaluate` scores comparisons with a model or a baseline; `prb merge` merges the parts of a run."""

import argparse
import shlex
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from prb_jax.commands.arguments import Parser, chosen, with_columns
from prb_jax.commands.configs import with_config
from prb_jax.commands.process import print_table, start
from prb_jax.commands.values import not_negative
from prb_jax.errors import RunError, printable
from prb_jax.platform.processes.sharing import on_first_process, process_index
from prb_jax.records.benchmarks import NAMES
from prb_jax.records.options import options_of

_POSTS: Final = "prb_jax.study.posts"
_COMPARISON: Final = "prb_jax.reports.comparison"
"""Modules that an evaluation may not need, imported on first use."""

_UNQUANTIZED: Final = "unquantized"
"""Run folder of the unquantised model, inside the quantised model's folder."""


def add(sub: Parser) -> None:
    from prb_jax.scoring.options import EvaluateOptions

    sub.option(
        "[MODEL]",
        "Hub id or Hugging Face folder (also at gs:// or s3://); a baseline: baseline:length, shorter, first, random, "
        "profile-overlap, "
        "popularity, nearest-users; FILE.py:NAME, a function of a comparison; or the URL of a `prb serve`, or of "
        "/classify or /pooling of vLLM or SGLang",
    )
    sub.option(
        "--data NAME_OR_PATH ...",
        f"Benchmark NAME or NAME:PATH ({', '.join(NAMES)}), .jsonl(.gz), .json, .csv or .parquet file, folder, "
        "hub data set, personas[:PART]; files and folders also at gs:// and s3://; repeatable",
    )
    sub.columns()
    sub.option("--out DIR", "Run folder, also at gs:// or s3://: run.json, scores.jsonl, summary.json")
    sub.option(
        "--profile-posts N ...",
        f"{options_of(EvaluateOptions)['view.profile_posts'].meaning}; several numbers give one run each, and a plot "
        "of accuracy by posts",
        not_negative,
        commas=True,
    )
    sub.fields(EvaluateOptions, without="profile_posts")
    sub.option(
        "--no-reference",
        "With --quantize: do not also score the same rows with the unquantised model for comparison",
    )
    sub.long_run("all scores are kept: the same command continues the run")
    sub.option(
        "--config FILE",
        "Python file whose get_config() returns these options ({'model': PATH, 'profile_posts': 3, ...}); options on "
        "the command line take precedence",
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
            "--part: supports only one run: give one number with --profile-posts, and --no-reference with --quantize"
        )
    shown = {"out": options.out, "progress": not options.no_progress, "profile_posts": posts[0]}
    asked = chosen(options, EvaluateOptions, **shown)
    if sweep:
        result: Any = import_module(_POSTS).run_posts(options.model, options.data, posts, asked)
    else:
        result = run_evaluation(options.model, options.data, asked)
    compared = None
    if paired:  # the quantised weights are freed by now: the two models are never in memory together
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
    from prb_jax.reports.summary import render_posts, render_summary  # rich is slow to import

    title = " ".join(options.data) + (f", --limit {options.limit}: testing only" if options.limit else "")
    if sweep:
        print_table(render_posts(result.points, title=title))
    else:
        print_table(render_summary(result.summary, title=title))
    if compared is not None:
        print_table(compared)
    print(f"written to {result.out}")


def _compares(options: argparse.Namespace) -> bool:
    """Return True if the unquantised model also scores the same rows, for comparison of the two runs."""
    if options.quantize is None and options.no_reference:
        raise RunError("--no-reference: requires --quantize")
    if options.quantize is not None and not options.no_reference and len(options.profile_posts or ()) > 1:
        raise RunError(
            "--profile-posts: several numbers score only the quantised model: add --no-reference to --quantize"
        )
    return options.quantize is not None and not options.no_reference


def add_merge(sub: Parser) -> None:
    sub.set_defaults(after_interrupt="the parts are unchanged: repeat the command")
    sub.option("PART ...", "Folders of all parts of a command with `--part I/N`, in any order", dest="parts")
    sub.option("--out DIR", "Run folder, of the same kind as the parts", required=True)


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
        print("Python code made the parts: repeat its call, without part and with this folder as out")
