"""`prb merge`: the parts of an evaluation become one run."""

import argparse

from prb_jax.commands import evaluate
from prb_jax.commands.arguments import Parser
from prb_jax.errors import RunError
from prb_jax.runs.command_line import set_command_line
from prb_jax.storage.urls import localise_options


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the parts are as they were: repeat the command")
    sub.option("PART ...", "folders of all parts of `prb evaluate --part I/N`, in any order", dest="parts")
    sub.option("--out DIR", "run folder: run.json, scores.jsonl, summary.json", required=True)


def run(options: argparse.Namespace) -> int:
    """Merge the rows, and finish the run as the command of the parts does without `--part`."""
    from prb_jax.runs.folder import EVALUATION
    from prb_jax.runs.parts import merge

    merged = merge(options.parts, out=options.out)
    words = (EVALUATION.read(merged) or {}).get("command")
    if not words:
        raise RunError(
            f"{options.out} holds the rows; the parts were made from Python: call prb_jax.evaluate as it was called, "
            "without part and with this folder as out, to finish the run"
        )
    sub = Parser(prog="prb evaluate")
    evaluate.add(sub)
    again = sub.parse_args(words[2:], argparse.Namespace(**vars(options)))
    again.words, again.parser = words[1:], sub
    localise_options(again)
    set_command_line(words)
    return evaluate.run(again)
