"""`prb personalise`: methods that learn a person's taste from a few comparisons, compared on the same people."""

import argparse
import json

from prb_jax.commands.arguments import (
    REWARD_MODEL,
    Parser,
    add_data,
    add_no_progress,
    not_negative,
    picked,
    positive,
    several,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.models import DTYPES
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
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
    sub.option("--dtype", "of a model (default: the checkpoint's)", choices=DTYPES)
    sub.option("--mesh M", "as data=4 (default: all devices)")
    sub.option("--responses-alone", "of an encoder of texts, as of `prb features`")
    sub.option(
        "--profile-posts N",
        "of a reward model, as of `prb features`: for the method profile_in_context",
        positive,
        default=0,
    )
    sub.option(
        "--format", "print results.json and study.json as one object instead of tables", choices=("json",)
    )
    sub.fields(LoadOptions, REWARD_MODEL)
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
        from prb_jax.study.methods import read_settings
        from prb_jax.study.personalise import people_of_study, personalise
        from prb_jax.study.write_features import FeatureOptions

        if options.dry_run:
            people = people_of_study(options.data, **picked(options, "shots seeds split subset limit"))
            print_table(render_people(people, options.shots))
            return 0
        if options.plan:
            from prb_jax.reports.study import render_plan
            from prb_jax.study.power import BAYES, plan_study

            plan = plan_study(
                options.data,
                **picked(options, "backbone out people seeds split repeats subset limit mesh"),
                shots=max(options.shots),
                settings=read_settings(options.settings).get(BAYES),
                progress=not options.no_progress,
            )
            if options.format == "json":
                print(json.dumps(plan, indent=2))
            else:
                print_table(render_plan(plan))
            return 0
        loading = LoadOptions(dtype=options.dtype, **picked(options, REWARD_MODEL))
        study = personalise(
            options.data,
            **picked(options, "backbone methods shots seeds split subset limit mesh"),
            out=options.out,
            settings=read_settings(options.settings),
            features=FeatureOptions(
                loading=loading,
                responses_alone=options.responses_alone,
                profile_posts=options.profile_posts,
            ),
            progress=not options.no_progress,
        )
    if options.format == "json":
        print(json.dumps({"results": study.results, "study": study.summary}, indent=2))
        return 0
    print_table(render_study(study.results, study.summary, title=" ".join(options.data)))
    print(f"written to {study.out}")
    return 0
