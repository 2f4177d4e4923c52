"""`prb personalise`: methods that learn a person's taste from few comparisons; `prb methods` and `prb ask`."""

import argparse
import json
from dataclasses import replace

from prb_jax.commands.arguments import (
    REWARD_MODEL,
    Parser,
    add_data,
    add_no_progress,
    call,
    chosen,
    not_negative,
    positive,
    several,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.study.feature_options import FeatureOptions

    sub.set_defaults(after_interrupt="the methods that are done are kept: the same command continues")
    add_data(sub, about="as of `prb evaluate`; comparisons need a user_id")
    sub.option("--backbone MODEL|DIR", "a model, or a folder of `prb features`", required=True)
    sub.option("--out DIR", "folder: results.json, study.json, curves.svg", required=True)
    sub.option(
        "--methods A,B",
        "names with commas between them, or all (default); pooled and offset are always among them",
        default="all",
    )
    sub.option(
        "--shots K,K",
        "comparisons of a person that a method is adapted on",
        several(not_negative),
        default=(0, 1, 2, 4, 8, 16),
    )
    sub.option(
        "--seeds N",
        "splits of the people; each person is unseen in at most one of them",
        positive,
        default=1,
    )
    sub.option(
        "--split",
        "what is new in the test: people (default), people and the questions that they are adapted on, or people and "
        "all questions",
        default="user",
        choices=("user", "other-question", "user+question"),
    )
    sub.option(
        "--set METHOD.FIELD=VALUE ...", "settings of methods, as lore.bases=4,8", default=[], dest="settings"
    )
    sub.option("--relax CHECK ...", "checks of the data that may fail: wrapper", default=[])
    sub.fields(
        FeatureOptions,
        f"dtype mesh responses_alone profile_posts {REWARD_MODEL}",
        profile_posts={
            "meaning": "of a reward model, as of `prb features`: for the method profile_in_context"
        },
    )
    sub.option(
        "--format", "print results.json and study.json as one object instead of tables", choices=("json",)
    )
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="print how many people have k comparisons to be adapted on, and write nothing",
    )
    sub.add_argument(
        "--plan",
        action="store_true",
        help="simulate studies of fewer and more people of this kind: how many are needed; writes plan.json alone",
    )
    sub.option(
        "--people N,N",
        "with --plan: numbers of people (default: a quarter, a half, once and twice as many as the data have)",
        several(positive),
        default=(),
    )
    sub.option("--repeats N", "with --plan: simulated studies of each number of people", positive, default=3)
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Run the study, and print its tables."""
    with until_terminated(options):
        start(options)
        from prb_jax.reports.study import render_people, render_study
        from prb_jax.study.feature_options import FeatureOptions
        from prb_jax.study.methods import read_settings
        from prb_jax.study.personalise import people_of_study, personalise

        if options.dry_run:
            print_table(render_people(call(people_of_study, options), options.shots))
            return 0
        if options.plan:
            from prb_jax.reports.study import render_plan
            from prb_jax.study.power import BAYES, plan_study

            settings = read_settings(options.settings).get(BAYES)
            plan = call(plan_study, options, shots=max(options.shots), settings=settings)
            if options.format == "json":
                print(json.dumps(plan, indent=2))
            else:
                print_table(render_plan(plan))
            return 0
        loading = replace(chosen(options, LoadOptions), mesh=None)
        features = chosen(options, FeatureOptions, loading=loading, view=ViewOptions())
        study = call(personalise, options, settings=read_settings(options.settings), features=features)
    if options.format == "json":
        print(json.dumps({"results": study.results, "study": study.summary}, indent=2))
        return 0
    print_table(render_study(study.results, study.summary, title=" ".join(options.data)))
    print(f"written to {study.out}")
    return 0


def add_methods(sub: Parser) -> None:
    """Add the arguments of `prb methods`."""


def run_methods(options: argparse.Namespace) -> int:
    """Print a line for each method."""
    from prb_jax.personal.few_shot.registry import method_names
    from prb_jax.reports.style import facts_table

    print_table(facts_table(method_names().items(), title="methods of personalisation"))
    return 0


def add_ask(sub: Parser) -> None:
    """Add the arguments of `prb ask`."""
    sub.option("DIR", "folder of a fitted method, in `fitted` of a study", dest="model")
    sub.option("--candidates FILE", "questions with two responses each", required=True)
    sub.option("--user FILE", "labelled comparisons of the person (default: nothing is known yet)")
    sub.option("--top N", "questions in the table", positive, default=10)
    sub.option("--out FILE", "all questions as JSON, the best one first")


def run_ask(options: argparse.Namespace) -> int:
    """Rank the questions, and print the first ones."""
    start(options)
    from prb_jax.reports.tables import render_questions
    from prb_jax.study.ask import ask, write_questions

    questions = ask(options.model, user=options.user, candidates=options.candidates)
    print_table(render_questions(questions, top=options.top))
    if options.out is not None:
        print(f"written to {write_questions(questions, options.out)}")
    return 0
