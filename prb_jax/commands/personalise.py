"""Verbs for methods that learn a person's taste: `prb features`, `personalise`, `methods` and `ask`."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prb_jax.commands.arguments import REWARD_MODEL, Parser, call, chosen
from prb_jax.commands.process import print_table, start
from prb_jax.commands.values import not_negative, positive
from prb_jax.models.readouts.load_options import IMPLICIT, LoadOptions
from prb_jax.text.view import ViewOptions


def add_features(sub: Parser) -> None:
    from prb_jax.personal.feature_options import FeatureOptions

    sub.option("MODEL", "Reward model, causal language model, or text encoder")
    sub.data()
    sub.option("--out DIR", "Folder of the features", required=True)
    sub.fields(FeatureOptions, without=f"attention {' '.join(IMPLICIT)}")
    sub.part("compute")
    sub.long_run("finished parts are kept: the same command continues", distributed=False)


def run_features(options: argparse.Namespace) -> None:
    """Write the states of a model at every response and post, and print counts."""
    start(options)
    from prb_jax.personal.feature_options import FeatureOptions
    from prb_jax.study.write_features import write_feature_part, write_features

    view = ViewOptions(protocol=options.protocol, max_length=options.max_length)
    wanted = chosen(options, FeatureOptions, view=view)
    if options.part is not None:
        call(write_feature_part, options, options=wanted)
        print(f"part {options.part}: written to {options.out}")
        return
    store = call(write_features, options, options=wanted)
    facts, cut = store.facts, store.facts["truncated"]
    print(
        f"{facts['answers']:,} responses and {facts['posts']:,} posts, {store.width:,} numbers each, {facts['dtype']}; "
        f"cut to the model's length: {cut['answers']:,} and {cut['posts']:,}"
    )
    kept = ["the reward of each response"] if store.rewards is not None else []
    kept += [f"{facts['shown']:,} rewards with a profile"] if store.shown is not None else []
    if kept:
        print(f"kept too: {' and '.join(kept)}")
    print(f"written to {store.path}")


def add(sub: Parser) -> None:
    from prb_jax.personal.feature_options import FeatureOptions

    sub.data(about="Data sources, see `prb evaluate`; comparisons require a user_id")
    sub.option("--backbone MODEL|DIR", "Model, or folder of `prb features`", required=True)
    sub.option("--out DIR", "Folder: results.json, study.json, curves.svg", required=True)
    about = "Names, or all (default); pooled and offset are always included"
    sub.option("--methods A,B", about, default="all")
    about = "Numbers of a person's comparisons to adapt a method on"
    sub.option("--shots K,K", about, not_negative, default=(0, 1, 2, 4, 8, 16))
    about = "Splits of the people; each person is unseen in at most one split"
    sub.option("--seeds N", about, positive, default=1)
    sub.option(
        "--split",
        "New in the test: people (default), people and the questions that they are adapted on, or people and "
        "all questions",
        default="user",
        choices=("user", "other-question", "user+question"),
    )
    sub.option(
        "--set METHOD.FIELD=VALUE ...",
        "Settings of methods, e.g. lore.bases=4,8",
        default=[],
        dest="settings",
    )
    sub.option("--relax CHECK ...", "Checks of the data that may fail: wrapper", default=[])
    posts = {"meaning": "Posts for the method profile_in_context, with a reward model; see `prb features`"}
    names = f"dtype mesh responses_alone profile_posts {REWARD_MODEL}"
    sub.fields(FeatureOptions, names, profile_posts=posts)
    about = "Print results.json and study.json as one object instead of tables"
    sub.option("--format", about, choices=("json",))
    sub.option("--dry-run", "Only print how many people have k comparisons to adapt on")
    sub.option(
        "--plan",
        "Only simulate studies with fewer and more people, to find how many are needed; writes plan.json",
    )
    sub.option(
        "--people N,N",
        "With --plan: numbers of people (default: a quarter, half, once and twice as many as in the data)",
        positive,
        default=(),
    )
    sub.option("--repeats N", "With --plan: simulated studies per number of people", positive, default=3)
    sub.long_run("finished methods are kept: the same command continues", distributed=False)


def run(options: argparse.Namespace) -> None:
    """Run the study, and print its tables."""
    start(options)
    from prb_jax.personal.feature_options import FeatureOptions
    from prb_jax.personal.few_shot.registry import read_settings
    from prb_jax.reports.planning import render_people, render_plan
    from prb_jax.reports.study import render_study
    from prb_jax.study.personalise import people_of_study, personalise

    settings = read_settings(options.settings)
    if options.dry_run:
        print_table(render_people(call(people_of_study, options), options.shots))
    elif options.plan:
        from prb_jax.study.simulation import plan_study

        plan = call(plan_study, options, shots=max(options.shots), settings=settings.get("bayes"))
        _print(options, plan, lambda: render_plan(plan))
    else:
        loading = replace(chosen(options, LoadOptions), mesh=None)
        features = chosen(options, FeatureOptions, loading=loading, view=ViewOptions())
        study = call(personalise, options, settings=settings, features=features)
        title = " ".join(options.data)
        both = {"results": study.results, "study": study.summary}
        _print(options, both, lambda: render_study(study.results, study.summary, title=title))
        if options.format is None:
            print(f"written to {study.out}")


def _print(options: argparse.Namespace, document: object, render: Callable[[], object]) -> None:
    if options.format == "json":
        print(json.dumps(document, indent=2))
    else:
        print_table(render())


def add_methods(sub: Parser) -> None:
    """Add the arguments of `prb methods`."""


def run_methods(options: argparse.Namespace) -> None:
    """Print one line per method."""
    from prb_jax.personal.few_shot.registry import method_names
    from prb_jax.reports.table import facts_table

    print_table(facts_table(method_names().items(), title="methods of personalisation"))


def add_ask(sub: Parser) -> None:
    sub.option("DIR", "Folder of a fitted method, inside `fitted` of a study", dest="model")
    sub.option("--candidates FILE", "Questions with two responses each", required=True)
    sub.option("--user FILE", "Labelled comparisons of the person (default: none)")
    sub.option("--top N", "Questions in the table", positive, default=10)
    sub.option("--out FILE", "Output file with all questions as JSON, best first")


def run_ask(options: argparse.Namespace) -> None:
    """Rank the questions, and print the first ones."""
    start(options)
    from prb_jax.records.writing import json_file, write_once
    from prb_jax.reports.planning import render_questions
    from prb_jax.study.ask import ask

    questions = ask(options.model, user=options.user, candidates=options.candidates)
    print_table(render_questions(questions, top=options.top))
    if options.out is not None:
        listed = json_file([question.to_json() for question in questions])
        write_once({Path(options.out): listed}, replace=True)
        print(f"written to {Path(options.out)}")
