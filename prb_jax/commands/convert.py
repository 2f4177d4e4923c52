"""`prb convert`: write a training run or a checkpoint as a Hugging Face folder."""

import argparse

from prb_jax.commands.arguments import REWARD_MODEL, Parser, call
from prb_jax.commands.process import start
from prb_jax.models import DTYPES
from prb_jax.readouts import LAYOUTS
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("SRC", "run of prb train or prb ppo, Hugging Face folder or hub id", dest="source")
    sub.option("DST", "folder to be made", dest="target")
    sub.option("--adapter", "of a run with tuning=lora: a PEFT adapter with its head")
    sub.option("--step S", "which checkpoint of a run: best, last or a number (default: best)")
    sub.option("--dtype", "of the weights but the head", choices=DTYPES)
    sub.option(
        "--layout",
        "of a checkpoint's head: *ForSequenceClassification, or v_head.summary as TRL and LLaMA-Factory have it",
        default="standard",
        choices=LAYOUTS,
    )
    sub.option("--drop-bias", "leave out the bias of a value head: differences stay equal")
    sub.fields(LoadOptions, REWARD_MODEL)


def run(options: argparse.Namespace) -> int:
    """Convert, and print where the folder is."""
    start(options)
    from prb_jax.training.convert import convert

    folder = call(convert, options)
    print(f"written to {folder}")
    return 0
