"""Verbs of samples and their rewards: `prb best-of-n`, and `prb distil`, which makes training data of them."""

import argparse

from prb_jax.commands.arguments import Parser, call, not_negative
from prb_jax.commands.process import print_table, start
from prb_jax.processes.sharing import process_index
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    """Add the arguments of `prb best-of-n`."""
    sub.set_defaults(after_interrupt="what was scored is kept: the same command continues the run")
    sub.option(
        "--samples DIR|FILE",
        "a finished run of `prb sample`; or a .jsonl file of {id, sample, text}, texts of anybody, with --data",
        required=True,
    )
    sub.option(
        "--rewards MODEL ...",
        "models or baselines, as of `prb evaluate`; or judge:MODEL, a language model that rates (judge:URL#NAME "
        "at an endpoint)",
        required=True,
        extend=False,
    )
    sub.option(
        "--quality Q",
        "reference: ROUGE-L against the best labelled response (default); a .jsonl file of {id, sample, quality}; "
        "a model whose score is the quality, as baseline:persona-truth for generated persons; or rubric:MODEL "
        "(rubric:URL#NAME), a judge of the true rubric's aspects",
        default="reference",
    )
    sub.option("--out DIR", "run folder: rewards.jsonl, summary.json, curves.png", required=True)
    about = "of the samples, where it has another name now, or where they are a file"
    sub.option("--data NAME_OR_PATH ...", about, extend=False)
    sub.history()
    sub.fields(ViewOptions)
    sub.option("--prompts DIR", "of judges: ask as the scripts whose checkout has this folder of prompts")
    sub.option("--template FILE", "of judge:MODEL, as of `prb judge`")
    sub.fields(LoadOptions, make="loading")
    sub.no_progress()
    sub.distributed()


def run(options: argparse.Namespace) -> None:
    """Score, and print the curves."""
    start(options)
    from prb_jax.judges.best_of_n import best_of_n, quality_label
    from prb_jax.judges.options import JudgeOptions
    from prb_jax.reports.table import ResultsTable, interval

    asked = JudgeOptions(prompts=options.prompts, template=options.template)
    result = call(best_of_n, options, judge=None if asked == JudgeOptions() else asked)
    if process_index() > 0:
        return
    found, curves = result.summary, result.summary["curves"]
    first = next(iter(curves.values()))
    columns = [("selector", list(curves))]
    columns += [
        (
            f"k={point['k']}",
            [interval(points[place]["quality"], points[place]["ci95"]) for points in curves.values()],
        )
        for place, point in enumerate(first)
    ]
    print_table(ResultsTable(f"quality of the best of k: {quality_label(options.quality)}", columns))
    if found["empty"]:
        others = f"prompts with nothing else: {len(found['left_out'])}"
        print(f"{found['empty']:,} empty samples cannot be scored and are left out; {others}")
    if found["unread"]:
        print(f"{found['unread']:,} samples have no number of a judge and are left out")
    if reason := first[0]["ci95_reason"]:
        print(f"no intervals: {reason}")
    print(f"written to {result.out}")


def add_distil(sub: Parser) -> None:
    """Add the arguments of `prb distil`."""
    sub.option("RUN", "a finished run of `prb best-of-n`", dest="run_folder")
    about = "whose rewards decide, as in --rewards of the run; not needed where there is one"
    sub.option("--reward NAME", about)
    about = "the worst sample, or any one that is worse by the margin (default: worst)"
    sub.option("--rejected KIND", about, default="worst", choices=("worst", "random"))
    sub.option("--margin M", "leave prompts out whose two rewards differ by less", float, default=0.0)
    sub.option("--seed N", "of --rejected random", not_negative, default=0)
    sub.option("--samples DIR", "the run of `prb sample`, where it lies elsewhere now")
    sub.option("--data NAME_OR_PATH ...", "of the samples, where it has another name now", extend=False)
    sub.option("--out DIR", "folder for pairs.jsonl and distil.json", required=True)


def run_distil(options: argparse.Namespace) -> None:
    """Write the best samples against worse ones, and print how many pairs there are."""
    from prb_jax.judges.distil import distil

    result = call(distil, options, run=options.run_folder)
    summary = result.summary
    print(
        f"{summary['pairs']:,} pairs of {summary['prompts']:,} prompts; mean reward "
        f"{summary['chosen_reward']:.3f} chosen, {summary['rejected_reward']:.3f} rejected, "
        f"{summary['mean_reward']:.3f} of all samples"
    )
    reasons = {
        "single": "one scored sample",
        "too_close": "rewards too close",
        "same_text": "twice the same text",
    }
    if left_out := [f"{summary[key]:,} with {why}" for key, why in reasons.items() if summary[key]]:
        print(f"left out: {', '.join(left_out)}")
    print(f"written to {result.path}")
