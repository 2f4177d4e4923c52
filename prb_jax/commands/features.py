"""`prb features`: the state of a model at every response and post of a data set, for methods of personalisation."""

import argparse

from prb_jax.commands.arguments import Parser, add_data, add_no_progress, add_part, call, chosen
from prb_jax.commands.process import start, until_terminated
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.study.feature_options import FeatureOptions

    sub.set_defaults(after_interrupt="the parts that are done are kept: the same command continues")
    sub.option("MODEL", "a reward model, a causal language model, or an encoder of texts")
    add_data(sub)
    sub.option("--out DIR", "folder of the features", required=True)
    sub.fields(FeatureOptions, without="attention")
    add_part(sub, "compute")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Write the features, and print what was written."""
    with until_terminated(options):
        start(options)
        from prb_jax.study.feature_options import FeatureOptions
        from prb_jax.study.write_features import write_feature_part, write_features

        view = ViewOptions(protocol=options.protocol, max_length=options.max_length)
        wanted = chosen(options, FeatureOptions, view=view)
        if options.part is not None:
            call(write_feature_part, options, options=wanted)
            print(f"part {options.part}: written to {options.out}")
            return 0
        store = call(write_features, options, options=wanted)
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
