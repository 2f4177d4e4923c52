"""`prb ask`: which question to put to a person next."""

import argparse

from prb_jax.commands.arguments import Parser, positive
from prb_jax.commands.process import start
from prb_jax.commands.terminal import print_table


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("DIR", "folder of a fitted method, in `fitted` of a study", dest="model")
    sub.option("--candidates FILE", "questions with two responses each", required=True)
    sub.option("--user FILE", "labelled comparisons of the person (default: nothing is known yet)")
    sub.option("--top N", "questions in the table", positive, default=10)
    sub.option("--out FILE", "all questions as JSON, the best one first")


def run(options: argparse.Namespace) -> int:
    """Rank the questions, and print the first ones."""
    start(options)
    from prb_jax.reports.tables import render_questions
    from prb_jax.study.ask import ask, write_questions

    questions = ask(options.model, user=options.user, candidates=options.candidates)
    print_table(render_questions(questions, top=options.top))
    if options.out is not None:
        print(f"written to {write_questions(questions, options.out)}")
    return 0
