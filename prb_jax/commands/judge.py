"""Verbs that query a language model: `prb judge` and `prb aspects`."""

import argparse

from prb_jax.commands.arguments import OF_REWARDS, Parser, call
from prb_jax.commands.process import print_table, start
from prb_jax.commands.values import not_negative, positive
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.processes.sharing import process_index


def add(sub: Parser) -> None:
    from prb_jax.behaviour.judges.options import JudgeOptions

    sub.option("[MODEL]", "Folder or hub id of a causal language model", dest="judge")
    sub.endpoint()
    sub.data(
        about="Data sources, see `prb evaluate`; two responses per comparison, unless the judge rates each response"
    )
    sub.option("--out DIR", "Run folder, as in `prb evaluate`", required=True)
    sub.fields(JudgeOptions, make="options")
    sub.fields(LoadOptions, without=OF_REWARDS, make="loading")
    sub.part("judge")
    sub.long_run("the judgements so far are kept, and the same command continues the run")


def run(options: argparse.Namespace) -> None:
    """Judge, and print the summary."""
    if options.endpoint is None:
        start(options)
    from prb_jax.behaviour.judges.judge import judge
    from prb_jax.reports.summary import render_summary

    result = call(judge, options, model=options.judge)
    if process_index() > 0:
        return
    if options.part is not None:
        print(f"part {options.part}: {result.summary['n']:,} judgements, written to {result.out}")
        return
    print_table(render_summary(result.summary, title=" ".join(options.data)))
    for name, value in result.summary["judge"].items():
        print(f"{name.replace('_', ' ')}: {f'{value:.4f}' if isinstance(value, float) else value}")
    print(f"written to {result.out}")


def add_aspects(sub: Parser) -> None:
    sub.option("[MODEL]", "Folder or hub id of a causal language model", dest="planner")
    sub.endpoint()
    sub.data(about="Data sources, see `prb evaluate`; the model sees only profiles and questions")
    sub.option("--out DIR", "Run folder: run.json, aspects.jsonl, summary.json", required=True)
    sub.option("--profile-posts N", "Posts of the user that the model sees", not_negative, default=10)
    sub.option("--max-new-tokens N", "Most new tokens of a text", positive, default=200)
    sub.fields(LoadOptions, without=OF_REWARDS, make="loading")
    sub.long_run("the texts so far are kept, and the same command continues the run", distributed=False)


def run_aspects(options: argparse.Namespace) -> None:
    """Write what each user wants from an answer, and print the number of texts."""
    if options.endpoint is None:
        start(options)
    from prb_jax.behaviour.judges.aspects import plan_aspects

    result = call(plan_aspects, options, model=options.planner)
    print(f"texts: {result.summary['n']}, of these without a word: {result.summary['empty']}")
    print(f"written to {result.out}")
