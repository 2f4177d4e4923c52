"""`prb prepare`: write comparisons as a data set of tensorflow-datasets."""

import argparse

from prb_jax.commands.arguments import (
    REWARD_MODEL,
    Parser,
    add_columns,
    not_negative,
    picked,
    positive,
    with_columns,
)
from prb_jax.errors import RunError
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.protocol import PROTOCOLS
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("--data NAME_OR_PATH ...", "what `prb evaluate --data` takes; repeatable", required=True)
    add_columns(sub)
    sub.option(
        "--split S ...",
        "splits of the data to read; they keep their names",
        default=["test"],
        extend=False,
    )
    sub.option("--out DIR", "folder for it; then valid as --data DIR", required=True)
    sub.option(
        "--model MODEL",
        "hub id or Hugging Face folder: also write the tokens that this model sees, for `prb evaluate MODEL "
        "--data DIR` and `prb train`; several models may share a folder",
    )
    sub.option("--profile-posts N", "with --model: as of `prb evaluate`", not_negative)
    sub.option("--protocol", "with --model: as of `prb evaluate`", choices=PROTOCOLS)
    sub.option("--max-length L", "with --model: as of `prb evaluate`", positive)
    sub.option(
        "--processes N",
        "with --model: processes that tokenise (default: 1, whose tokenizer has threads of its own)",
        positive,
    )
    sub.fields(LoadOptions, REWARD_MODEL)


def run(options: argparse.Namespace) -> int:
    """Write the data set and the tokens, and print how much is in it."""
    from prb_jax.sources.prepare import prepare

    asked = picked(options, "profile_posts protocol max_length")
    given = {**asked, "processes": options.processes, **picked(options, REWARD_MODEL)}
    if options.model is None and (without := [name for name, value in given.items() if value is not None]):
        raise RunError(f"--{without[0].replace('_', '-')}: is about the tokens of a model, and needs --model")
    options.data = [with_columns(source, options.columns) for source in options.data]
    prepared = prepare(options.data, out=options.out, splits=options.split)
    stores = []
    if options.model is not None:
        from prb_jax.scoring.write_tokens import TokensJob, write_store

        job = TokensJob(
            model=options.model,
            loading=LoadOptions(**picked(options, REWARD_MODEL)),
            view=ViewOptions(**asked),
            sources=options.data,
            folder=prepared.folder,
        )
        stores = [write_store(job, split=split, processes=options.processes or 1) for split in options.split]
    for split, count in prepared.counts.items():
        print(f"{split}: {count:,} comparisons")
    print(f"written to {prepared.folder}")
    for store in stores:
        print(f"tokens written to {store}")
    return 0
