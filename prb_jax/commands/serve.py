"""`prb serve`: answer HTTP requests for scores."""

import argparse
import os

from prb_jax.commands.arguments import (
    DEVICES,
    REWARD_MODEL,
    Parser,
    add_history,
    chosen,
    not_negative,
    picked,
    positive,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.serving.fields import Limits

    sub.set_defaults(after_interrupt="nothing was served")
    sub.option(
        "MODEL",
        "what `prb evaluate` takes; FILE.py:NAME, a function of a comparison; or judge:MODEL (judge:URL#NAME at an "
        "endpoint), a language model that rates each response",
    )
    sub.option(
        "--host HOST",
        "address (default: 127.0.0.1, this machine alone); another one needs a token in PRB_SERVE_TOKEN",
        default="127.0.0.1",
    )
    sub.option("--port P", "(default: 8000); 0 picks one", not_negative, default=8000)
    sub.fields(ViewOptions)
    sub.option("--batch-tokens N", "tokens computed at a time, about", positive)
    sub.fields(Limits)
    add_history(sub)
    sub.option("--template FILE", "of judge:MODEL, as of `prb judge`")
    sub.option("--top-logprobs N", "of judge:URL#NAME, as of `prb judge`", positive)
    sub.fields(LoadOptions, DEVICES)
    sub.fields(LoadOptions, REWARD_MODEL)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    with until_terminated(options):
        start(options)
        from prb_jax.judges.options import JudgeOptions
        from prb_jax.serving.fields import Limits
        from prb_jax.serving.serve import TOKEN, ServeOptions, serve

        asked = JudgeOptions(template=options.template, top_logprobs=options.top_logprobs)
        serve(
            options.model,
            options=ServeOptions(
                **picked(options, "host port batch_tokens history"),
                token=os.environ.get(TOKEN) or None,
                view=chosen(options, ViewOptions),
                limits=chosen(options, Limits),
                judge=None if asked == JudgeOptions() else asked,
            ),
            loading=chosen(options, LoadOptions),
        )
    return 0
