"""`prb serve`: answer HTTP requests for scores."""

import argparse
import os

from prb_jax.commands.arguments import (
    Parser,
    add_devices,
    add_history,
    add_model_options,
    device_options,
    model_options,
    not_negative,
    positive,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.text.protocol import PROTOCOLS


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="nothing was served")
    sub.option("MODEL", "what `prb evaluate` takes, but for baselines")
    sub.option(
        "--host HOST",
        "address (default: 127.0.0.1, this machine alone); another one needs a token in PRB_SERVE_TOKEN",
        default="127.0.0.1",
    )
    sub.option("--port P", "(default: 8000); 0 picks one", not_negative, default=8000)
    sub.option(
        "--profile-posts N",
        "posts of a profile that the model sees (default: as in training, or 10)",
        not_negative,
    )
    sub.option("--protocol", "(default: as in training, or default)", choices=PROTOCOLS)
    sub.option("--max-length L", "longest conversation in tokens (default: the model's)", positive)
    sub.option("--batch-tokens N", "tokens computed at a time, about", positive)
    _add_limit(sub, "--max-bytes", 16_000_000, "bytes of a request")
    _add_limit(sub, "--max-items", 1024, "responses of a request")
    _add_limit(sub, "--max-waiting", 8192, "responses that may wait for their scores")
    _add_limit(sub, "--max-connections", 2048, "connections at a time")
    _add_limit(sub, "--timeout", 120, "seconds until a request is answered")
    add_history(sub)
    add_devices(sub)
    add_model_options(sub)


def _add_limit(sub: argparse.ArgumentParser, flag: str, default: int, about: str) -> None:
    sub.add_argument(flag, metavar="N", type=positive, default=default, help=f"{about} (default: {default})")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    with until_terminated(options):
        start(options)
        from prb_jax.readouts.load_options import LoadOptions
        from prb_jax.serving.http_server import Limits
        from prb_jax.serving.serve import TOKEN, ServeOptions, serve
        from prb_jax.text.view import ViewOptions

        serve(
            options.model,
            options=ServeOptions(
                host=options.host,
                port=options.port,
                token=os.environ.get(TOKEN) or None,
                view=ViewOptions(
                    profile_posts=options.profile_posts,
                    protocol=options.protocol,
                    max_length=options.max_length,
                ),
                batch_tokens=options.batch_tokens,
                history=options.history,
                limits=Limits(
                    bytes=options.max_bytes,
                    items=options.max_items,
                    waiting=options.max_waiting,
                    connections=options.max_connections,
                    seconds=options.timeout,
                ),
            ),
            loading=LoadOptions(**device_options(options), **model_options(options)),
        )
    return 0
