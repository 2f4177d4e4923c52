"""`prb compare`: compare every two of several finished runs on the same data, with intervals, exact tests and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.errors import RunError, counted, listed
from prb_jax.metrics.paired import COMPARISON_DEFINITIONS, HALF, compare_rows
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS
from prb_jax.platform.processes.agreement import differences
from prb_jax.records.writing import refuse_file, write_json
from prb_jax.reports.table import Getter, Table, answered, bounded, change, field, gained, interval, number
from prb_jax.runs.finished import FinishedRun
from prb_jax.runs.harness_logs import read_run
from prb_jax.scoring.prompt_extras import told_of

if TYPE_CHECKING:
    from rich.console import Group

RANKS: Final = {"rank": field("rank_group"), "run": field("name"), "accuracy": bounded("accuracy", "ci95")}
"""Columns for the runs of a comparison."""

COMPARE: Final = "compare.json"
_DIFFERENCES_SHOWN: Final = 4
_PAIRS_SHOWN: Final = 10
_NO_SETTINGS: Final = ("data", "limit", "hints", "order_claim", "versions")  # hints are always shown in words


def compare(
    *runs: str | Path,
    out: str | Path | None = None,
    across_protocols: bool = False,
    metric: Sequence[str] = (),
    cluster: Sequence[str] = (),
    ties: str = HALF,
    log_loss: bool = False,
) -> dict[str, Any]:
    """Compare every two of several finished runs of `prb evaluate`, or of another harness, on the same data.

    Args:
      runs: Two or more run folders, or logs of lm-evaluation-harness or Inspect, as for
        :func:`prb_jax.runs.harness_logs.read_run`.
      out: Folder for `compare.json`; without a folder nothing is written.
      across_protocols: Compare runs with different protocols, which show the models different texts.
      metric: Metric to read for each task, for a log that has several.
      cluster: One or two fields of a log's samples by which rows are clustered (default: user_id and item_id, if
        samples have them).
      ties: Value of a tie in ranks and differences: "half" a win, or a "loss".
      log_loss: Also compare log-losses. Scores must be log-odds on the same scale, e.g. of calibrated models.

    Returns:
      The contents of `compare.json`: "runs" from the best to the worst (name, accuracy, ci95, ci95_reason, ties,
      half_credit_accuracy, rank_group; model, protocol, profile_posts, differs, hints, path), "pairs" (a, b,
      difference, ci95, detectable, p, p_holm, p_mcnemar, n, users, flips, scores), "tie_credit" and "definitions",
      which explains them. With ``log_loss`` runs have "log_loss" and "log_loss_ci95", pairs the difference with its
      interval and p-values. The name of a run is the name of its folder, or the path as given if two folders share a
      name.

    Raises:
      RunError: there are fewer than two runs; a run is given twice or not finished; a log cannot be read as samples
        with one grade each; runs have different data or, without ``across_protocols``, different protocols: each
        difference is named.
      DataError: runs contain different comparisons.
    """
    if len(runs) < 2:
        raise RunError(f"compare: expected two runs or more, found {len(runs)}")
    if out is not None:
        refuse_file(out)
    named = named_runs([Path(run) for run in runs])
    by_name = {name: read_run(path, metric=metric, cluster=cluster) for name, path in named.items()}
    (first, reference), *others = by_name.items()
    for name, run in others:
        check_comparable(first, reference, name, run, across_protocols=across_protocols)
    rows = {name: run.rows for name, run in by_name.items()}
    compared = compare_rows(rows, clusters=reference.clusters, ties=ties, log_loss=log_loss)
    differing = what_differs(by_name)
    for standing in compared["runs"]:
        run = by_name[standing["name"]]
        inputs = run.record["inputs"]
        standing |= {
            "model": run.summary.get("model"),
            "protocol": inputs.get("protocol"),
            "profile_posts": inputs.get("profile_posts"),
            "differs": differing[standing["name"]],
            "ci95_reason": run.summary.get("ci95_reason"),
            "hints": told_of(inputs.get("hints") or {}),
            "path": str(run.path),
        }
    compared["definitions"] = dict(COMPARISON_DEFINITIONS)
    if out is not None:
        write_json(Path(out) / COMPARE, compared)
    return compared


def named_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Return run folders by name, or by path as given if two share a name.

    Raises:
      RunError: a folder is given twice.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        before = seen.setdefault(path.resolve(), path)
        if before is not path:
            raise RunError(f"{path}: given twice, also as {before}; expected different runs")
    short = [path.resolve().name for path in paths]
    shared = len(set(short)) < len(short)
    return {str(path) if shared else name: path for name, path in zip(short, paths, strict=True)}


def what_differs(runs: Mapping[str, FinishedRun]) -> dict[str, str]:
    """Return the settings that distinguish runs of one model, e.g. "4 posts"; empty for the only run of a model."""
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for name, run in runs.items():
        by_model.setdefault(str(run.record.get("model")), {})[name] = dict(_settings(run.record["inputs"]))
    shown = dict.fromkeys(runs, "")
    for settings in by_model.values():
        keys = dict.fromkeys(key for values in settings.values() for key in values)
        changed = [key for key in keys if len({repr(values.get(key)) for values in settings.values()}) > 1]
        for name, values in settings.items():
            words = [
                counted(values["profile_posts"], "post")
                if key == "profile_posts" and key in values
                else f"{key} {'none' if values.get(key) is None else values[key]}"
                for key in changed
            ]
            shown[name] = listed(words, most=_DIFFERENCES_SHOWN)
    return shown


def _settings(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings that determine a model's scores, except data and versions; digests are shortened."""
    for name, value in inputs.items():
        if name == "model":
            for key, part in value.items():
                if key == "files":
                    yield from ((file, str(digest)[:15]) for file, digest in part.items())
                else:
                    yield key, part
        elif name not in _NO_SETTINGS:
            yield name, value


def _short(value: str) -> str:
    """Return a value of a record; a digest is shortened."""
    return re.sub(r"(sha256:\w{8})\w+", r"\1...", value)


def check_comparable(
    a: str, run_a: FinishedRun, b: str, run_b: FinishedRun, *, across_protocols: bool
) -> None:
    """Raise RunError if two runs have different data, or different protocols without ``across_protocols``, or if the
    accuracy of one is undefined."""
    for name, run in ((a, run_a), (b, run_b)):
        if run.summary.get("accuracy") is None:
            reason = run.summary.get("ci95_reason")
            raise RunError(f"{name}: its accuracy is not defined on these data ({reason}); leave it out")
    ours, theirs = run_a.record["inputs"], run_b.record["inputs"]
    data = [{name: inputs.get(name) for name in ("data", "limit")} for inputs in (ours, theirs)]
    if changed := differences(*data):
        named = [f"{field}: {_short(old)} and {_short(new)}" for field, (old, new) in changed.items()]
        more = len(named) - _DIFFERENCES_SHOWN
        shown = "; ".join(named[:_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise RunError(
            f"{a} and {b} are runs on different data, which cannot be compared; these differ: {shown}"
        )
    protocols = ours.get("protocol"), theirs.get("protocol")
    if protocols[0] != protocols[1] and not across_protocols:
        raise RunError(
            f"{a} and {b} have different protocols, {protocols[0]} and {protocols[1]}, which show the models different "
            "texts; --across-protocols compares them nevertheless"
        )


def comparison_answer(compared: Mapping[str, Any]) -> str:
    """Return the best run and its lead in one sentence, from the result of `compare`."""
    runs, pairs = compared["runs"], compared["pairs"]
    best = [str(run["name"]) for run in runs if run["rank_group"] == 1]
    other = best[-1] if len(best) > 1 else str(runs[1]["name"])
    pair = next(pair for pair in pairs if (pair["a"], pair["b"]) == (best[0], other))
    half = " (ties count half)" if compared["tie_credit"] and any(run["ties"] for run in runs) else ""
    by = gained(pair["difference"], pair["ci95"])
    lead = f"{f'ahead of {other} by' if pair['difference'] else f'and its lead over {other} is'} {by}{half}"
    # not in percent: of the graded rows of another harness, it is the mean grade, on any scale
    accuracy = interval(runs[0]["accuracy"], runs[0]["ci95"]).replace("..", ", ")
    if len(best) == 1:
        found = f"its accuracy on {counted(pair['n'], 'comparison')} is {accuracy}"
        return f"{best[0]} is the best of {len(runs)} runs: {found}, {lead}."
    names = f"{', '.join(best[:-1])} and {best[-1]}"
    runs_up = f", the best of {len(runs)} runs" if len(best) < len(runs) else ""
    why = "" if pair["p"] is not None else f"; fewer than {LEAST_CLUSTERS} users or responses give no verdict"
    return (
        f"{counted(pair['n'], 'comparison')} cannot tell {names} apart{runs_up}: {best[0]} has an accuracy of "
        f"{accuracy}, {lead}{why}."
    )


def difference_columns(compared: Mapping[str, Any]) -> dict[str, Getter]:
    """Return the columns of paired differences, for the terminal and pages."""
    columns: dict[str, Getter] = {
        "difference": change("difference", "ci95"),
        "p, Holm": field("p_holm", "{:.2g}"),
        "would find": field("detectable", "{:.3f}"),
        "other verdict": field("flips", "{:,}"),
    }
    if compared["pairs"][0].get("log_loss_difference") is not None:
        columns["log-loss"] = change("log_loss_difference", "log_loss_ci95")
        columns["its p, Holm"] = field("log_loss_p_holm", "{:.2g}")
    return columns


def score_columns() -> dict[str, Getter]:
    """Return the columns of differences of the scores themselves, for pages."""
    return {
        "mean": lambda pair: f"{pair['scores']['mean']:.2g}",
        "RMS": _rms,
        "largest": lambda pair: f"{pair['scores']['max_abs']:.2g}",
        "Pearson": lambda pair: number(pair["scores"]["pearson"], "{:.4f}"),
        "Spearman": lambda pair: number(pair["scores"]["spearman"], "{:.4f}"),
    }


def render_comparison(compared: Mapping[str, Any]) -> Group:
    """Return the answer of `compare`, and a table of the runs in their rank groups and of the differences."""
    runs, pairs = compared["runs"], compared["pairs"]
    first, differences = pairs[0], difference_columns(compared)
    shown = pairs if len(pairs) <= _PAIRS_SHOWN else [pair for pair in pairs if pair["a"] == runs[0]["name"]]
    heads = [
        "rank",
        "run",
        "accuracy,\ndifference",
        *(head.replace(" ", "\n") for head in list(differences)[1:]),
    ]
    empty = len(differences) - 1
    ties = any(run["ties"] for run in runs)
    rows: list[list[str]] = []
    for run in runs:
        told = [
            str(run["model"]),
            run["differs"],
            run["hints"],
            f"{run['ties']:,} ties" if run["ties"] else "",
        ]
        about = ", ".join(dict.fromkeys(filter(None, told)))
        figures = [""] * empty
        if "log-loss" in differences:
            figures[-2] = bounded("log_loss", "log_loss_ci95")(run)
        rows.append([RANKS["rank"](run), f"{run['name']}: {about}", RANKS["accuracy"](run), *figures])
    rows.append([])
    for pair in shown:
        cells = [getter(pair) for getter in differences.values()]
        rows.append(["", f"{pair['a']} minus {pair['b']}", *cells])
    users = f" of {counted(first['users'], 'user')}" if first["users"] else ""
    note = f"{counted(first['n'], 'comparison')}{users}; [..] 95 % interval; "
    note += "same rank: the data cannot tell the runs apart"
    if ties:
        note += f"; a tie is not a win, and in differences {'half a win' if compared['tie_credit'] else 'nothing'}"
    notes = [note, "would find: smallest difference found with a power of 80 %; other verdict: comparisons"]
    reasons = [run["ci95_reason"] for run in runs if run["ci95"] is None and run["ci95_reason"]]
    more = [f"no interval: {reason}" for reason in dict.fromkeys(reasons)]
    if len(shown) < len(pairs):
        more.append(f"only differences from the best run: all {len(pairs)} are in {COMPARE}")
    if len(runs) == 2:
        scores = first["scores"]
        more.append(
            f"scores: RMS difference {_rms(first)}, largest {scores['max_abs']:.2g}, "
            f"Pearson {number(scores['pearson'], '{:.4f}')}"
        )
    notes += ["; ".join(more)] if more else []
    table = Table("", heads, rows, words=2, whole=True)
    return answered(table, answer=comparison_answer(compared), notes=notes)


def _rms(pair: Mapping[str, Any]) -> str:
    rms, spread = pair["scores"]["rms"], pair["scores"]["std_b"]
    return f"{rms:.2g}" + (f" ({rms / spread:.1%})" if spread else "")
