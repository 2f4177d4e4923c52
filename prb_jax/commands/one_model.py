"""Verbs with one model: `prb inspect`, `prb convert`, and `prb serve`, which answers HTTP requests for scores."""

import argparse
import os
from pathlib import Path

from prb_jax.commands.arguments import REWARD_MODEL, Parser, asked_judge, call, chosen, given_flags
from prb_jax.commands.process import hide_torch, print_table, start
from prb_jax.commands.values import not_negative, positive
from prb_jax.errors import RunError
from prb_jax.models import DTYPES
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.text.view import PROTOCOLS
from prb_jax.training import LAYOUTS


def add_inspect(sub: Parser) -> None:
    sub.option(
        "MODEL",
        "Hub id, Hugging Face folder, or run of prb train or prb ppo: a reward model, a language model "
        "or an encoder",
    )
    sub.fields(LoadOptions, f"quantize {REWARD_MODEL}")
    sub.option(
        "--data NAME_OR_PATH ...",
        "Data sources, see `prb evaluate --data`: report their lengths for this model, and rows cut or rejected",
    )
    sub.option(
        "--max-length L",
        "Longest conversation in tokens (default: as in training, or the model's; paper protocol: 8,192)",
        positive,
    )
    sub.option("--protocol", "Protocol to check (default: both)", choices=PROTOCOLS)
    sub.option(
        "--profile-posts N",
        "With --data: posts of the user's profile (default: as in training, or 10; paper protocol: 0)",
        not_negative,
    )
    sub.option("--limit N", "With --data: only the first N comparisons of each source", positive)


def run_inspect(options: argparse.Namespace) -> None:
    """Check a checkpoint without reading its weights, and print the facts."""
    hide_torch(options)
    from prb_jax.reports.inspection.inspect import inspect
    from prb_jax.reports.table import facts_table

    print_table(facts_table(call(inspect, options).items()))


def add_convert(sub: Parser) -> None:
    sub.option("[SRC]", "Run of prb train or prb ppo, Hugging Face folder or hub id", dest="source")
    sub.option("[DST]", "Folder to create", dest="target")
    sub.option("--data NAME_OR_PATH", "Comparisons to write for other trainers, in place of SRC and DST")
    sub.option(
        "--to FORMAT", "Format of --data: trl, JSON lines of prompt, chosen and rejected", choices=("trl",)
    )
    sub.option(
        "--profile-posts N",
        "With --data: posts of the profile in the prompt (default: 0)",
        not_negative,
    )
    sub.option("--out FILE", "With --data: file to create (default: standard output)")
    sub.option("--adapter", "Write a PEFT adapter with its head, from a run with tuning=lora")
    sub.option("--step S", "Checkpoint of a run: best, last or a number (default: best)")
    sub.option("--dtype", "Type of the weights except the head", choices=DTYPES)
    sub.option(
        "--layout",
        "Layout of the head: *ForSequenceClassification, or v_head.summary as in TRL and LLaMA-Factory",
        default="standard",
        choices=LAYOUTS,
    )
    sub.option("--drop-bias", "Leave out the bias of a value head: score differences do not change")
    sub.fields(LoadOptions, REWARD_MODEL)


def run_convert(options: argparse.Namespace) -> None:
    """Write a Hugging Face folder and print its path, or write data for other trainers."""
    if options.data is not None:
        _convert_data(options)
        return
    if given := given_flags(options) & {"--to", "--profile-posts", "--out"}:
        raise RunError(f"{min(given)}: requires --data")
    if options.target is None:
        options.parser.error("expected SRC and DST, or --data NAME_OR_PATH --to trl")
    start(options)
    from prb_jax.training.convert import convert

    print(f"written to {call(convert, options)}")


def _convert_data(options: argparse.Namespace) -> None:
    from prb_jax.records.writing import json_line, write_once
    from prb_jax.text.trl_rows import trl_rows

    others = given_flags(options) - {"--data", "--to", "--profile-posts", "--out"}
    if options.to is None or options.source is not None or others:
        wrong = min(others, default="SRC")
        raise RunError(
            f"--data: expected --to trl with it, found {wrong}" if options.to else "--data: expected --to trl"
        )
    lines = map(json_line, trl_rows(options.data, profile_posts=options.profile_posts or 0))
    if options.out is None:
        for line in lines:
            print(line.decode(), end="")
        return
    rows = list(lines)
    write_once({Path(options.out): b"".join(rows)})
    print(f"written to {options.out}: {len(rows):,} rows")


def add_serve(sub: Parser) -> None:
    from prb_jax.serving.options import ServeOptions

    sub.set_defaults(after_interrupt="nothing was served")
    sub.option(
        "MODEL",
        "Model as in `prb evaluate`; FILE.py:NAME, a function of a comparison; or judge:MODEL (judge:URL#NAME at an "
        "endpoint), a language model that rates each response, or pairs:MODEL, which compares the responses",
    )
    sub.fields(ServeOptions)
    sub.judge()
    sub.fields(LoadOptions)


def run_serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    start(options)
    from prb_jax.scoring.remote.score_server import TOKEN
    from prb_jax.serving.options import ServeOptions
    from prb_jax.serving.serve import serve

    serving = chosen(options, ServeOptions, token=os.environ.get(TOKEN) or None, judge=asked_judge(options))
    serve(options.model, options=serving, loading=chosen(options, LoadOptions))
