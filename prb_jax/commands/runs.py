"""Verbs that read finished runs: `prb compare`, `leaderboard`, `report`, `correlate` and `push`."""

import argparse
import json
from pathlib import Path

from prb_jax.commands.arguments import Parser, call, keywords
from prb_jax.commands.process import print_table
from prb_jax.commands.values import not_negative, positive
from prb_jax.errors import DataError, quote

_FORMATS = ("csv", "latex", "markdown", "rewardbench")
_LOGS = ", or logs of lm-evaluation-harness (--log_samples) or Inspect"


def _add_logs(sub: Parser) -> None:
    """Add options for reading logs of other harnesses."""
    about = "Metric to read of each task of a log with several, e.g. acc or exact_match,strict-match"
    sub.option("--metric M ...", about, default=[])
    sub.option(
        "--cluster FIELD ...",
        "One or two fields of a log's samples: rows with the same value are dependent (default: user_id and "
        "item_id, if samples have them)",
        default=[],
        commas=True,
    )


def add_compare(sub: Parser) -> None:
    sub.option("RUN ...", f"Run folders of `prb evaluate`{_LOGS}, two or more", dest="runs")
    sub.option("--out DIR", "Folder for compare.json")
    _add_logs(sub)
    sub.option("--format", "Print the contents of compare.json instead of tables", choices=("json",))
    sub.option("--across-protocols", "Also compare runs with different protocols")
    sub.option("--ties", "Value of a tie in ranks and differences", choices=("half", "loss"), default="half")
    sub.option("--log-loss", "Also compare log-losses: scores must be log-odds, e.g. of a calibrated model")


def run_compare(options: argparse.Namespace) -> None:
    """Compare, and print the ranks and the differences."""
    from prb_jax.reports.comparison import COMPARE, compare, render_comparison

    named = keywords(compare, options)
    compared = compare(*named.pop("runs"), **named)
    if options.format == "json":
        print(json.dumps(compared, indent=2))
        return
    print_table(render_comparison(compared))
    if options.out is not None:
        print(f"written to {options.out}/{COMPARE}")


def add_leaderboard(sub: Parser) -> None:
    sub.option("DIR", "Folder to search, at any depth", dest="folder")
    sub.option("--format", "Format to print instead of a terminal table", choices=_FORMATS)
    sub.option("--unfinished", "Include unfinished runs")
    sub.option("--controls", "Include the controls of runs as separate runs")
    sub.option(
        "--upper-bounds", "Include runs that saw the true rubric or narrative, which no model could know"
    )
    sub.option("--out FILE", "Also write a page, e.g. page.html")


def run_leaderboard(options: argparse.Namespace) -> None:
    """Print the table."""
    from prb_jax.reports.leaderboard import leaderboard
    from prb_jax.reports.leaderboard_shown import format_leaderboard, render_leaderboard

    entries = call(leaderboard, options)
    if options.format is not None:
        print(format_leaderboard(entries, options.format), end="")
        return
    print_table(render_leaderboard(entries))
    if options.out is not None:
        print(f"written to {options.out}")


def add_report(sub: Parser) -> None:
    about = f"Folder of `prb evaluate`, `prb train`, `prb ppo`, `prb personalise` or `prb correlate`{_LOGS}"
    sub.option("RUN ...", about, dest="runs")
    sub.option("--out FILE", "Output page, e.g. page.html", required=True)
    about = "Current location of the runs' data (default: as recorded in the runs)"
    sub.option("--data NAME_OR_PATH ...", about, default=[])
    sub.option("--title TEXT", "Title of the page (default: the names of the runs)", default="")
    _add_logs(sub)


def run_report(options: argparse.Namespace) -> None:
    """Write the page."""
    from prb_jax.reports.report import report

    print(f"written to {call(report, options)}")


def add_correlate(sub: Parser) -> None:
    about = "Runs of `prb evaluate`, one per reward model"
    sub.option("--scores RUN ...", about, required=True, commas=True)
    about = "Runs of `prb best-of-n`, `prb policy-accuracy`, `prb guide`, `prb ppo` with watch.gold"
    sub.option("--behaviour RUN ...", about, required=True, commas=True)
    sub.option("--out DIR", "Folder for correlate.json and correlate.png")
    sub.option("--lineage FILE", "JSON file, {name of a score run: lineage}")
    about = "Figures of the benchmark, e.g. accuracy or user_accuracy (default: all)"
    sub.option("--figures F ...", about, commas=True)
    sub.option("--quantile Q", "Quantile over users and subsets", float, default=0.1)
    sub.option(
        "--ties", "Value of a tie in figures of the benchmark", choices=("half", "loss"), default="half"
    )
    sub.option("--draws N", "Bootstrap draws of users and models", positive, default=2000)
    sub.option(
        "--start X ...",
        "Behaviour of an untrained policy, or NAME=X for each (default: the one with baseline:random as reward)",
        extend=False,
    )
    about = "Smallest gain of the upper bound over the start that gives power"
    sub.option("--least-gain X", about, float, default=0.0)
    sub.option("--plan", "Print how many models and prompts resolve a correlation of 0.3, 0.5, 0.8")
    sub.option("--seed N", "Seed of the draws", not_negative, default=0)


def run_correlate(options: argparse.Namespace) -> None:
    """Correlate, and print the tables."""
    from prb_jax.reports.correlation import correlate
    from prb_jax.reports.correlation_shown import CORRELATE, PICTURE, render_correlation

    correlation = call(correlate, options, start=_start(options.start))
    print_table(render_correlation(correlation))
    if options.out is not None:
        picture = f" and {PICTURE}" if (Path(options.out) / PICTURE).exists() else ""
        print(f"written to {options.out}/{CORRELATE}{picture}")


def _start(words: list[str] | None) -> float | dict[str, float] | None:
    """Return one number, or numbers by behaviour.

    Raises:
      DataError: a word is neither a number nor BEHAVIOUR=NUMBER.
    """
    if not words:
        return None
    pairs = [word.rpartition("=") for word in words]
    try:
        numbers = {name: float(number) for name, _, number in pairs}
    except ValueError:
        raise DataError(f"--start: expected X or NAME=X, found {quote(' '.join(words))}") from None
    if "" in numbers and len(words) > 1:
        expected = "expected one X, or NAME=X of each behaviour"
        raise DataError(f"--start: {expected}, found {quote(' '.join(words))}")
    return numbers.get("", numbers)


def add_push(sub: Parser) -> None:
    sub.set_defaults(after_interrupt="nothing was published: all files are one commit")
    sub.option("RUN", "Folder of `prb train`, or of `prb evaluate` with a local model", dest="run_folder")
    sub.option("ORG/NAME", "Repository on the hub, created if missing", dest="repository")
    sub.option("--evaluations RUN ...", "Evaluations of this model, for tables in the card", default=[])
    about = "Task of the benchmark in the eval.yaml of its data set on the hub"
    sub.option("--task-id ID", about, default="default")
    sub.option("--dry-run", "Print the files and the card, but publish nothing")
    sub.option("--private", "Make a new repository private")


def run_push(options: argparse.Namespace) -> None:
    """Upload, and print the address."""
    from prb_jax.reports.push import CARD, EVAL_RESULTS, prepare_push, push

    named = {"evaluations": options.evaluations, "task_id": options.task_id}
    if options.dry_run:
        upload = prepare_push(options.run_folder, options.repository, **named)
        print(f"nothing is published: --dry-run. {upload.repository} would get, in one commit:")
        for path in upload.files:
            print(f"  {path.name}  {path.stat().st_size:,} bytes")
        print(f"  {CARD}\n\n{upload.card}", end="")
        if upload.results:
            print(f"\n  {EVAL_RESULTS}\n\n{upload.results}", end="")
        return
    address = push(options.run_folder, options.repository, **named, private=options.private)
    print(f"published at {address}")
