"""`prb rank-profiles`: order each user's posts by their relevance to the question."""

import argparse

from prb_jax.commands.arguments import Verbs, add_no_progress, add_verb, positive
from prb_jax.commands.process import start
from prb_jax.models import DTYPES
from prb_jax.text.protocol import PROTOCOLS


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "rank-profiles",
        run,
        about="write the same comparisons with each user's posts ordered by relevance to the question",
    )
    sub.add_argument(
        "--encoder", metavar="E", required=True, help="bm25, recency, or a model: folder or hub id"
    )
    sub.add_argument("--data", metavar="NAME_OR_PATH", required=True, help="what `prb evaluate --data` takes")
    sub.add_argument("--out", metavar="FILE", required=True, help=".jsonl or .jsonl.gz")
    sub.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        default="default",
        help="paper: ids stay where they are while posts move, as in the paper's script",
    )
    sub.add_argument("--mesh", metavar="M", help="of a model: as data=4 (default: all devices)")
    sub.add_argument("--dtype", choices=DTYPES, help="of a model (default: the checkpoint's)")
    sub.add_argument(
        "--max-length",
        metavar="L",
        type=positive,
        help="of a model: longest text in tokens; what is longer loses its end (default: the model's)",
    )
    sub.add_argument("--revision", metavar="R", help="of a model: branch, tag or commit on the hub")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Rank, and print how much was ranked."""
    from prb_jax.retrieval.rank_profiles import rank_profiles
    from prb_jax.retrieval.rankers import RANKERS

    if options.encoder not in RANKERS:
        start(options)
    ranked = rank_profiles(
        options.data,
        encoder=options.encoder,
        out=options.out,
        protocol=options.protocol,
        mesh=options.mesh,
        dtype=options.dtype,
        max_length=options.max_length,
        revision=options.revision,
        progress=not options.no_progress,
    )
    print(f"{ranked.path}: {ranked.records:,} comparisons, {ranked.profiles:,} with a ranked profile")
    if ranked.texts:
        print(
            f"{ranked.texts:,} distinct texts embedded, {ranked.truncated:,} of them cut to the encoder's length"
        )
    return 0
