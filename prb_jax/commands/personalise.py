"""`prb personalise`: methods that learn a person's taste from a few comparisons, compared on the same people."""

import argparse
import json

from prb_jax.commands.arguments import (
    Verbs,
    add_data,
    add_model_options,
    add_no_progress,
    add_verb,
    model_options,
    not_negative,
    positive,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.models import DTYPES


def add(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    sub = add_verb(
        verbs,
        "personalise",
        run,
        about="compare methods that learn a person's taste from a few comparisons",
        after_interrupt="the methods that are done are kept: the same command continues",
    )
    add_data(sub, about="as of `prb evaluate`; comparisons need a user_id")
    sub.add_argument(
        "--backbone", metavar="MODEL|DIR", required=True, help="a model, or a folder of `prb features`"
    )
    sub.add_argument(
        "--out", metavar="DIR", required=True, help="folder: results.json, study.json, curves.svg"
    )
    sub.add_argument(
        "--methods",
        metavar="A,B",
        default="all",
        help="names with commas between them, or all (default); pooled and offset are always among them",
    )
    sub.add_argument(
        "--shots",
        metavar="K,K",
        type=_numbers,
        default=(0, 1, 2, 4, 8, 16),
        help="comparisons of a person that a method is adapted on (default: 0,1,2,4,8,16)",
    )
    sub.add_argument(
        "--seeds",
        metavar="N",
        type=positive,
        default=1,
        help="splits of the people; each person is unseen in at most one of them (default: 1)",
    )
    sub.add_argument(
        "--split",
        choices=("user", "user+question"),
        default="user",
        help="what is new in the test: people (default), or people and questions",
    )
    sub.add_argument(
        "--set",
        metavar="METHOD.FIELD=VALUE",
        dest="settings",
        nargs="+",
        action="extend",
        default=[],
        help="settings of methods, as lore.bases=4,8",
    )
    sub.add_argument("--dtype", choices=DTYPES, help="of a model (default: the checkpoint's)")
    sub.add_argument("--mesh", metavar="M", help="as data=4 (default: all devices)")
    sub.add_argument(
        "--responses-alone", action="store_true", help="of an encoder of texts, as of `prb features`"
    )
    sub.add_argument(
        "--profile-posts",
        metavar="N",
        type=positive,
        default=0,
        help="of a reward model, as of `prb features`: for the method profile_in_context",
    )
    sub.add_argument(
        "--format",
        choices=("json",),
        help="print results.json and study.json as one object instead of tables",
    )
    add_model_options(sub)
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="print how many people have k comparisons to be adapted on, and write nothing",
    )
    add_no_progress(sub)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(not_negative(part) for part in text.split(","))


def run(options: argparse.Namespace) -> int:
    """Run the study, and print its tables."""
    with until_terminated(options):
        start(options)
        from prb_jax.readouts.load_options import LoadOptions
        from prb_jax.reports.study import render_people, render_study
        from prb_jax.study.personalise import people_of_study, personalise
        from prb_jax.study.settings import read_settings
        from prb_jax.study.write_features import FeatureOptions

        if options.dry_run:
            people = people_of_study(
                options.data,
                shots=options.shots,
                seeds=options.seeds,
                split=options.split,
                subset=options.subset,
                limit=options.limit,
            )
            print_table(render_people(people, options.shots))
            return 0
        loading = LoadOptions(dtype=options.dtype, **model_options(options))
        study = personalise(
            options.data,
            backbone=options.backbone,
            out=options.out,
            methods=options.methods,
            shots=options.shots,
            seeds=options.seeds,
            split=options.split,
            settings=read_settings(options.settings),
            features=FeatureOptions(
                loading=loading,
                responses_alone=options.responses_alone,
                profile_posts=options.profile_posts,
            ),
            subset=options.subset,
            limit=options.limit,
            mesh=options.mesh,
            progress=not options.no_progress,
        )
    if options.format == "json":
        print(json.dumps({"results": study.results, "study": study.summary}, indent=2))
        return 0
    print_table(render_study(study.results, study.summary, title=" ".join(options.data)))
    print(f"written to {study.out}")
    return 0
