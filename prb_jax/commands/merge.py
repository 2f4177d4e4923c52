"""`prb merge`: the parts of a run become one."""

import argparse
from importlib import import_module

from prb_jax.commands.arguments import Parser
from prb_jax.errors import RunError, quote
from prb_jax.runs.command_line import set_command_line
from prb_jax.storage.urls import localise_options

WITH_PARTS = ("evaluate", "features", "judge", "sample")


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the parts are as they were: repeat the command")
    sub.option("PART ...", "folders of all parts of a command with `--part I/N`, in any order", dest="parts")
    sub.option("--out DIR", "run folder, as of the command of the parts", required=True)


def run(options: argparse.Namespace) -> int:
    """Merge the rows, and finish the run as the command of the parts does without `--part`."""
    from prb_jax.data.reading import read_object
    from prb_jax.runs.kind import RUN
    from prb_jax.runs.parts import merge

    merged = merge(options.parts, out=options.out)
    words = read_object(merged / RUN, error=RunError).get("command")
    if not words:
        raise RunError(
            f"{options.out} holds the rows; the parts were made from Python: make the same call, "
            "without part and with this folder as out, to finish the run"
        )
    if len(words) < 2 or words[1] not in WITH_PARTS:
        raise RunError(
            f"{merged / RUN}: command: expected prb {' or '.join(WITH_PARTS)}, found {quote(words)}"
        )
    sub, verb = Parser(prog=" ".join(words[:2])), import_module(f"prb_jax.commands.{words[1]}")
    verb.add(sub)
    again = sub.parse_args(words[2:], argparse.Namespace(**vars(options)))
    again.words, again.parser = words[1:], sub
    localise_options(again)
    set_command_line(words)
    return verb.run(again)
