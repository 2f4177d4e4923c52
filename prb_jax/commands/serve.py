"""`prb serve`: answer HTTP requests for scores."""

import argparse
import os

from prb_jax.commands.arguments import Parser, chosen, positive
from prb_jax.commands.process import start
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.serving.options import ServeOptions

    sub.set_defaults(after_interrupt="nothing was served")
    sub.option(
        "MODEL",
        "what `prb evaluate` takes; FILE.py:NAME, a function of a comparison; or judge:MODEL (judge:URL#NAME at an "
        "endpoint), a language model that rates each response",
    )
    sub.fields(ServeOptions)
    sub.option("--template FILE", "of judge:MODEL, as of `prb judge`")
    sub.option("--top-logprobs N", "of judge:URL#NAME, as of `prb judge`", positive)
    sub.fields(LoadOptions)


def run(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    start(options)
    from prb_jax.judges.options import JudgeOptions
    from prb_jax.remote.score_server import TOKEN
    from prb_jax.serving.options import ServeOptions
    from prb_jax.serving.serve import serve

    asked = JudgeOptions(template=options.template, top_logprobs=options.top_logprobs)
    judge = None if asked == JudgeOptions() else asked
    serving = chosen(options, ServeOptions, token=os.environ.get(TOKEN) or None, judge=judge)
    serve(options.model, options=serving, loading=chosen(options, LoadOptions))
