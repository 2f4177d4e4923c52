"""`prb rank-profiles`: order each user's posts by their relevance to the question."""

import argparse

from prb_jax.commands.arguments import Parser, add_no_progress, call, positive
from prb_jax.commands.process import start
from prb_jax.models import DTYPES
from prb_jax.text.protocol import PROTOCOLS


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("--encoder E", "bm25, recency, or a model: folder or hub id", required=True)
    sub.option("--data NAME_OR_PATH", "what `prb evaluate --data` takes", required=True)
    sub.option("--out FILE", ".jsonl or .jsonl.gz", required=True)
    sub.option(
        "--protocol",
        "paper: ids stay where they are while posts move, as in the paper's script",
        default="default",
        choices=PROTOCOLS,
    )
    sub.option("--mesh M", "of a model: as data=4 (default: all devices)")
    sub.option("--dtype", "of a model (default: the checkpoint's)", choices=DTYPES)
    sub.option(
        "--max-length L",
        "of a model: longest text in tokens; what is longer loses its end (default: the model's)",
        positive,
    )
    sub.option("--revision R", "of a model: branch, tag or commit on the hub")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Rank, and print how much was ranked."""
    from prb_jax.retrieval.rank_profiles import rank_profiles
    from prb_jax.retrieval.rankers import RANKERS

    if options.encoder not in RANKERS:
        start(options)
    ranked = call(rank_profiles, options)
    print(f"{ranked.path}: {ranked.records:,} comparisons, {ranked.profiles:,} with a ranked profile")
    if ranked.texts:
        print(
            f"{ranked.texts:,} distinct texts embedded, {ranked.truncated:,} of them cut to the encoder's length"
        )
    return 0
