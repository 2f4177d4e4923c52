"""`prb features`: the state of a model at every response and post of a data set, for methods of personalisation."""

import argparse

from prb_jax.commands.arguments import REWARD_MODEL, Parser, add_data, add_no_progress, picked, positive
from prb_jax.commands.process import start, until_terminated
from prb_jax.models import DTYPES
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.protocol import PROTOCOLS
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="the parts that are done are kept: the same command continues")
    sub.option("MODEL", "a reward model, a causal language model, or an encoder of texts")
    add_data(sub)
    sub.option("--out DIR", "folder of the features", required=True)
    sub.option("--store", "numbers of the files", default="float32", choices=DTYPES)
    sub.option("--responses-alone", "an encoder of texts reads each response without its prompt")
    sub.option(
        "--profile-posts N",
        "a reward model also scores each response with the first N posts of the profile before its prompt",
        positive,
        default=0,
    )
    sub.option("--protocol", "of conversations (default: as in training, or default)", choices=PROTOCOLS)
    sub.option("--max-length L", "longest text in tokens (default: the model's)", positive)
    sub.option("--dtype", "of the computation (default: the checkpoint's)", choices=DTYPES)
    sub.fields(LoadOptions, "mesh")
    sub.fields(LoadOptions, "quantize")
    sub.fields(LoadOptions, REWARD_MODEL)
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Write the features, and print what was written."""
    with until_terminated(options):
        start(options)
        from prb_jax.study.write_features import FeatureOptions, write_features

        store = write_features(
            options.model,
            options.data,
            out=options.out,
            options=FeatureOptions(
                loading=LoadOptions(
                    **picked(options, "mesh dtype quantize"), **picked(options, REWARD_MODEL)
                ),
                view=ViewOptions(protocol=options.protocol, max_length=options.max_length),
                **picked(options, "store responses_alone profile_posts"),
            ),
            subset=options.subset,
            limit=options.limit,
            progress=not options.no_progress,
        )
    facts = store.facts
    cut = facts["truncated"]
    print(
        f"{facts['answers']:,} responses and {facts['posts']:,} posts, {store.width:,} numbers each, {facts['dtype']}; "
        f"cut to the model's length: {cut['answers']:,} and {cut['posts']:,}"
    )
    kept = [
        *(["the reward of each response"] if store.rewards is not None else []),
        *([f"{facts['shown']:,} rewards with a profile"] if store.shown is not None else []),
    ]
    if kept:
        print(f"kept too: {' and '.join(kept)}")
    print(f"written to {store.path}")
    return 0
