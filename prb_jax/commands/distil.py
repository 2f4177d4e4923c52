"""`prb distil`: training data out of samples and their rewards."""

import argparse

from prb_jax.commands.arguments import Parser, call, not_negative


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("RUN", "a finished run of `prb best-of-n`", dest="run_folder")
    sub.option(
        "--reward NAME", "whose rewards decide, as in --rewards of the run; not needed where there is one"
    )
    sub.option(
        "--rejected KIND",
        "the worst sample, or any one that is worse by the margin (default: worst)",
        default="worst",
        choices=("worst", "random"),
    )
    sub.option("--margin M", "leave prompts out whose two rewards differ by less", float, default=0.0)
    sub.option("--seed N", "of --rejected random", not_negative, default=0)
    sub.option("--samples DIR", "the run of `prb sample`, where it lies elsewhere now")
    sub.option("--data NAME_OR_PATH ...", "of the samples, where it has another name now", extend=False)
    sub.option("--out DIR", "folder for pairs.jsonl and distil.json", required=True)


def run(options: argparse.Namespace) -> int:
    """Choose, and print how many pairs there are."""
    from prb_jax.judges.distil import distil

    result = call(distil, options, run=options.run_folder)
    summary = result.summary
    print(
        f"{summary['pairs']:,} pairs of {summary['prompts']:,} prompts; mean reward "
        f"{summary['chosen_reward']:.3f} chosen, {summary['rejected_reward']:.3f} rejected, "
        f"{summary['mean_reward']:.3f} of all samples"
    )
    left_out = {
        "one scored sample": "single",
        "rewards too close": "too_close",
        "twice the same text": "same_text",
    }
    if reasons := [f"{summary[key]:,} with {why}" for why, key in left_out.items() if summary[key]]:
        print(f"left out: {', '.join(reasons)}")
    print(f"written to {result.path}")
    return 0
