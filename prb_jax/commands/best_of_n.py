"""`prb best-of-n`: how good the best of k samples is, as reward models choose it."""

import argparse

from prb_jax.commands.arguments import Parser, add_history, add_no_progress, call, chosen
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
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
    sub.option(
        "--data NAME_OR_PATH ...",
        "of the samples, where it has another name now, or where they are a file",
        extend=False,
    )
    add_history(sub)
    sub.fields(ViewOptions)
    sub.option("--prompts DIR", "of judges: ask as the scripts whose checkout has this folder of prompts")
    sub.option("--template FILE", "of judge:MODEL, as of `prb judge`")
    sub.fields(LoadOptions)
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Score, and print the curves."""
    with until_terminated(options):
        start(options)
        from prb_jax.judges.best_of_n import best_of_n, quality_label
        from prb_jax.judges.options import JudgeOptions
        from prb_jax.reports.style import ResultsTable

        judged = options.prompts is not None or options.template is not None
        judge = JudgeOptions(prompts=options.prompts, template=options.template) if judged else None
        result = call(best_of_n, options, loading=chosen(options, LoadOptions), judge=judge)
    curves = result.summary["curves"]
    sizes = [point["k"] for point in next(iter(curves.values()))]
    columns = [("selector", list(curves))]
    for place, size in enumerate(sizes):
        columns.append((f"k={size}", [_cell(points[place]) for points in curves.values()]))
    print_table(ResultsTable(f"quality of the best of k: {quality_label(options.quality)}", columns))
    if result.summary["empty"]:
        print(
            f"{result.summary['empty']:,} empty samples cannot be scored and are left out; prompts with nothing else: "
            f"{len(result.summary['left_out'])}"
        )
    if result.summary["unread"]:
        print(f"{result.summary['unread']:,} samples have no number of a judge and are left out")
    if reason := next(iter(curves.values()))[0]["ci95_reason"]:
        print(f"no intervals: {reason}")
    print(f"written to {result.out}")
    return 0


def _cell(point: dict) -> str:
    if point["ci95"] is None:
        return f"{point['quality']:.3f}"
    low, high = point["ci95"]
    return f"{point['quality']:.3f} [{low:.3f}..{high:.3f}]"
