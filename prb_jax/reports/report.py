"""`prb report`: one page about one or several runs, as one self-contained file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from prb_jax.errors import RunError, counted
from prb_jax.metrics.paired import COMPARISON_DEFINITIONS, compare_rows
from prb_jax.platform.extras import has_extra
from prb_jax.records.reading import read_json
from prb_jax.records.schema import check_schema
from prb_jax.reports.comparison import (
    RANKS,
    comparison_answer,
    difference_columns,
    named_runs,
    score_columns,
    what_differs,
)
from prb_jax.reports.correlation_shown import CORRELATE, correlation_chapter
from prb_jax.reports.drawings import draw_points
from prb_jax.reports.evaluation import chance_of, estimates_of, evaluation_chapter, model_name
from prb_jax.reports.forest import BASELINE, CONTROL, Estimate, draw_forest
from prb_jax.reports.page import Block, Chapter, Drawing, Paragraph, Section, check_page, write_page
from prb_jax.reports.pairs import TextReader
from prb_jax.reports.study import STUDY, study_chapter
from prb_jax.reports.summary import POSTS, headline, posts_answer
from prb_jax.reports.table import Table
from prb_jax.reports.training import training_chapter
from prb_jax.runs.finished import FinishedRun
from prb_jax.runs.harness_logs import read_run
from prb_jax.runs.training import TRAIN

_SWEEP = "posts.json"
_ROOM = 1_200_000  # maximum bytes for texts of pairs, over all runs


def report(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    data: str | Path | Sequence[str | Path] = (),
    title: str = "",
    metric: Sequence[str] = (),
    cluster: Sequence[str] = (),
) -> Path:
    """Write a page about runs: their figures with intervals, comparisons of them, and the pairs to read.

    The page is one file without links to other resources. The texts of comparisons come from the data of each run; if
    these are missing or have changed, the page states this and only shows the figures.

    Args:
      runs: One or several folders of `prb evaluate` (also with several numbers of posts), of `prb train` and `prb ppo`
        for learning curves, of `prb personalise` and of `prb correlate`; or logs of lm-evaluation-harness and Inspect,
        as for :func:`prb_jax.compare`.
      out: File with a name that ends in .html; an existing file is replaced.
      data: Current location of the data of the runs, as for `prb_jax.evaluate`; by default the names that each run was
        given.
      title: Title of the page; by default the names of the runs.
      metric, cluster: Options for logs, as for :func:`prb_jax.compare`.

    Returns:
      The path of the page.

    Raises:
      RunError: a folder contains no finished run, or the page cannot be written.
      DataError: `data` are given but do not belong to a run.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    check_page(out)
    if not folders:
        raise RunError("runs: expected at least one folder of a run")
    named_runs(folders)
    has_extra("report", "the pictures of the page")
    reader = TextReader([str(place) for place in ([data] if isinstance(data, str | Path) else data)])
    studies, sweeps, trainings, correlations = (
        [folder for folder in folders if (folder / file).is_file()]
        for file in (STUDY, _SWEEP, TRAIN, CORRELATE)
    )
    evaluations: list[Path] = []
    for folder in folders:
        if folder in sweeps:
            evaluations += _points(folder).values()
        elif folder not in (*studies, *trainings, *correlations):
            evaluations.append(folder)
    finished = [read_run(folder, metric=metric, cluster=cluster) for folder in evaluations]
    kinds = (
        evaluations,
        [*studies, *trainings, *correlations],
    )  # a training run and its evaluation may share a name
    names = {path: name for of_kind in kinds for name, path in named_runs(of_kind).items()}
    differing = what_differs({names[run.path]: run for run in finished})
    titles: dict[Path, str] = {}
    for run in finished:
        name, about = names[run.path], (model_name(run.record), differing[names[run.path]])
        told = ", ".join(part for part in about if part not in ("", name))
        titles[run.path] = f"{name}: {told}" if told else name
    chapters = [_several(finished, names, titles)] if len(finished) > 1 else []
    by_path = {run.path: run for run in finished}
    for number, folder in enumerate(sweeps, start=1):
        runs_by_posts = {posts: by_path[path] for posts, path in _points(folder).items()}
        chapters.append(_sweep(folder, f"posts-{number}", runs_by_posts))
    for number, run in enumerate(finished, start=1):
        place = {"name": f"run-{number}", "title": titles[run.path]}
        chapters.append(evaluation_chapter(run, reader.read(run), **place, room=_ROOM // len(finished)))
    for number, folder in enumerate(trainings, start=1):
        chapters.append(training_chapter(folder, names[folder], f"training-{number}"))
    for number, folder in enumerate(studies, start=1):
        chapters.append(study_chapter(folder, names[folder], f"study-{number}"))
    for number, folder in enumerate(correlations, start=1):
        chapters.append(correlation_chapter(folder, names[folder], f"correlation-{number}"))
    shown = [names.get(folder, folder.resolve().name) for folder in folders]
    return write_page(chapters, out=out, title=title or f"Report: {', '.join(shown)}")


class _Point(TypedDict):
    profile_posts: int


class _Sweep(TypedDict):
    points: list[_Point]


def _points(folder: Path) -> dict[int, Path]:
    """Return the runs of `prb evaluate --profile-posts` with several numbers, by number."""
    path = folder / _SWEEP
    sweep = read_json(path, error=RunError)
    where = f"{path}: not of `prb evaluate --profile-posts`"
    check_schema(sweep, _Sweep, where=where, error=RunError)
    numbers = sorted(point["profile_posts"] for point in sweep["points"])
    if len(set(numbers)) < max(2, len(numbers)):
        raise RunError(f"{where}: field 'points': expected two numbers of posts or more, found {numbers}")
    return {number: folder / f"posts-{number}" for number in numbers}


def _sweep(folder: Path, name: str, runs: Mapping[int, FinishedRun]) -> Chapter:
    from prb_jax.study.posts import sweep_points  # slow to import

    points, title = sweep_points(runs, next(iter(runs.values())).clusters), "Accuracy by posts shown"
    drawing = draw_points(
        title,
        [(str(point["profile_posts"]), point.get("accuracy"), point.get("ci95")) for point in points],
        xlabel="posts of the profile that the model is shown",
        description="The same model and the same comparisons at each point; bars are 95 % intervals.",
    )
    table = Table.of(title, points, POSTS, note="The differences are paired.")
    heading = f"{folder.resolve().name}: accuracy by posts shown"
    return Chapter(heading, name, posts_answer(points), [drawing], [Section("Figures", [table])])


def _several(runs: Sequence[FinishedRun], names: Mapping[Path, str], titles: Mapping[Path, str]) -> Chapter:
    """Return a chapter with all runs in one picture, and comparisons of runs on the same data."""
    alike: dict[str, list[FinishedRun]] = {}
    for run in runs:
        inputs = run.record["inputs"]
        key = json.dumps([inputs.get("data"), inputs.get("limit")], sort_keys=True)
        alike.setdefault(key, []).append(run)
    opening: list[Block] = []
    blocks: list[Block] = []
    answers = []
    for group in alike.values():
        for run in [run for run in group if run.summary.get("accuracy") is None]:
            group.remove(run)
            blocks.append(Paragraph(f"{names[run.path]}: {run.summary.get('ci95_reason')}.", True))
        if not group:
            continue
        compared = None
        if len(group) > 1:
            compared = compare_rows({names[run.path]: run.rows for run in group}, clusters=group[0].clusters)
            answers.append(comparison_answer(compared))
            blocks += _tables(compared, group)
        opening.append(_picture(group, names, compared))
        if compared is None:
            blocks.append(Paragraph(f"{names[group[0].path]}: no other run on the same data.", True))
    answer = answers[0] if answers else f"{len(runs)} runs without common data: none can be compared."
    table = headline({titles[run.path]: run.summary for run in runs}, title="All runs")
    return Chapter("All runs", "all", answer, opening, [Section("Comparison", [table, *blocks])])


def _picture(
    runs: Sequence[FinishedRun], names: Mapping[Path, str], compared: Mapping[str, Any] | None
) -> Drawing:
    """Draw runs on the same data, the best first, each with its controls, then the baselines."""
    lines: list[Estimate] = []
    baselines: dict[str, Estimate] = {}
    order = [run["name"] for run in compared["runs"]] if compared else []
    for run in sorted(runs, key=lambda run: order.index(names[run.path]) if compared else 0):
        for one in estimates_of(run.summary, name=names[run.path]):
            if one.kind == BASELINE:
                baselines.setdefault(one.label, one)
            elif one.kind == CONTROL:
                lines.append(replace(one, label=f"{names[run.path]}, {one.label}"))
            else:
                lines.append(one)
    shown = {str(run.record.get("model")).removeprefix("baseline:") for run in runs}
    lines += [one for name, one in baselines.items() if name not in shown]
    size = counted(len(runs[0].rows), "comparison")
    title = f"{len(runs)} runs on the same {size}" if len(runs) > 1 else f"{names[runs[0].path]}: {size}"
    description = (
        "To compare two runs, the paired differences in the table below are more precise than two intervals."
    )
    return draw_forest(
        title,
        lines,
        reference=chance_of(runs[0]),
        what="a run",
        description=description if len(runs) > 1 else "",
    )


def _tables(compared: Mapping[str, Any], runs: Sequence[FinishedRun]) -> list[Block]:
    """Return tables of the results of `prb compare` for runs on the same data."""
    meanings = COMPARISON_DEFINITIONS
    protocols = sorted({str(run.record["inputs"].get("protocol")) for run in runs})
    across = f" The runs have different protocols: {', '.join(protocols)}." if len(protocols) > 1 else ""
    title = f"Ranks on the same {compared['pairs'][0]['n']:,} comparisons"
    ranks = Table.of(title, compared["runs"], RANKS, words=2, note=f"Rank: {meanings['rank_group']}.{across}")
    pair = {"on the same comparisons": lambda pair: f"{pair['a']} minus {pair['b']}"}
    note = f"[..] {meanings['ci95']}. p, Holm: {meanings['p_holm']}. Would find: {meanings['detectable']}."
    differences = Table.of(
        "Paired differences of accuracy", compared["pairs"], pair | difference_columns(compared), note=note
    )
    note = f"Of {meanings['scores']}."
    scores = Table.of("Differences of the scores", compared["pairs"], pair | score_columns(), note=note)
    return [ranks, differences, scores]
