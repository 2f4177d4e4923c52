"""`prb convert`: write a training run or a checkpoint as a Hugging Face folder."""

import argparse

from prb_jax.commands.arguments import Verbs, add_model_options, add_verb, model_options
from prb_jax.commands.process import start
from prb_jax.models import DTYPES
from prb_jax.readouts import LAYOUTS


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs, "convert", run, about="write a training run or a checkpoint as a Hugging Face folder"
    )
    sub.add_argument(
        "source", metavar="SRC", help="run of prb train or prb ppo, Hugging Face folder or hub id"
    )
    sub.add_argument("target", metavar="DST", help="folder to be made")
    sub.add_argument(
        "--adapter", action="store_true", help="of a run with tuning=lora: a PEFT adapter with its head"
    )
    sub.add_argument(
        "--step", metavar="S", help="which checkpoint of a run: best, last or a number (default: best)"
    )
    sub.add_argument("--dtype", choices=DTYPES, help="of the weights but the head")
    sub.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="standard",
        help="of a checkpoint's head: *ForSequenceClassification, or v_head.summary as TRL and LLaMA-Factory have it",
    )
    sub.add_argument(
        "--drop-bias", action="store_true", help="leave out the bias of a value head: differences stay equal"
    )
    add_model_options(sub)


def run(options: argparse.Namespace) -> int:
    """Convert, and print where the folder is."""
    start(options)
    from prb_jax.training.convert import convert

    folder = convert(
        options.source,
        options.target,
        adapter=options.adapter,
        step=options.step,
        dtype=options.dtype,
        drop_bias=options.drop_bias,
        layout=options.layout,
        **model_options(options),
    )
    print(f"written to {folder}")
    return 0
