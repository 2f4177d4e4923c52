"""`prb inspect`: check a checkpoint without reading its weights."""

import argparse

from prb_jax.commands.arguments import REWARD_MODEL, Parser, call, not_negative, positive
from prb_jax.commands.process import hide_torch
from prb_jax.commands.terminal import print_table
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.protocol import PROTOCOLS


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option(
        "MODEL",
        "hub id, Hugging Face folder, or a run of prb train or prb ppo: a reward model, a language model "
        "or an encoder",
    )
    sub.fields(LoadOptions, "quantize")
    sub.fields(LoadOptions, REWARD_MODEL)
    sub.option(
        "--data NAME_OR_PATH ...",
        "what `prb evaluate --data` takes: says how long it is for this model, and what is cut or refused",
    )
    sub.option(
        "--max-length L",
        "longest conversation in tokens (default: as in training, or the model's; of the paper protocol 8,192)",
        positive,
    )
    sub.option("--protocol", "one of them (default: both)", choices=PROTOCOLS)
    sub.option(
        "--profile-posts N",
        "with --data: posts of the user's profile (default: as in training, or 10; 0 for the paper protocol)",
        not_negative,
    )
    sub.option("--limit N", "with --data: the first N comparisons of each source", positive)


def run(options: argparse.Namespace) -> int:
    """Inspect, and print the facts."""
    hide_torch(options)
    from prb_jax.inspection.inspect import inspect
    from prb_jax.reports.style import facts_table

    facts = call(inspect, options)
    print_table(facts_table(facts.items()))
    return 0
