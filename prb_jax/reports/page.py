"""`prb report`: one page of one or several runs, in one file that needs nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_object
from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError
from prb_jax.metrics.paired import COMPARISON_DEFINITIONS, compare_rows
from prb_jax.reports.blocks import (
    Block,
    Cell,
    Chapter,
    PageTable,
    Paragraph,
    Section,
    figure_cell,
    headline,
    visible,
)
from prb_jax.reports.comparison import named_runs, what_differs
from prb_jax.reports.drawings import draw_points
from prb_jax.reports.evaluation import evaluation_chapter, model_name
from prb_jax.reports.pairs import TextReader
from prb_jax.reports.study import STUDY, study_chapter
from prb_jax.reports.style import signed
from prb_jax.reports.training import training_chapter
from prb_jax.runs.finished import FinishedRun
from prb_jax.runs.harness_logs import read_run

_TRAINING = "train.json"
_SWEEP = "posts.json"
_ROOM = 1_200_000  # bytes of texts of pairs, of all runs together


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

    The page is one file without any address of another one. The texts of comparisons are read from the data of each
    run; where those are gone or have changed, the page says so and shows the figures alone.

    Args:
      runs: folders of `prb evaluate` (also with several numbers of posts), of `prb train` and
        `prb ppo` for learning curves, and of `prb personalise`; or logs of lm-evaluation-harness and Inspect, as
        :func:`prb_jax.compare` takes them; one or several.
      out: the file, with a name that ends in .html; it is replaced where it exists.
      data: where the data of the runs lie now, as `prb_jax.evaluate` takes them; the names that each run was given,
        if there are none.
      title: of the page; the names of the runs if there is none.
      metric, cluster: of logs, as of :func:`prb_jax.compare`.

    Returns:
      The path of the page.

    Raises:
      RunError: a folder holds no finished run, or the page cannot be written.
      DataError: `data` are given and not those of a run.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise RunError(f"{target}: expected a name that ends in .html")
    if target.is_dir():
        raise RunError(f"{target}: the page would replace a folder; give --out a file")
    if not folders:
        raise RunError("runs: expected at least one folder of a run")
    named_runs(folders)
    places = [data] if isinstance(data, str | Path) else list(data)
    reader = TextReader([str(place) for place in places])
    studies, sweeps = ([f for f in folders if (f / file).is_file()] for file in (STUDY, _SWEEP))
    trainings = [folder for folder in folders if (folder / _TRAINING).is_file()]
    evaluations = [
        part
        for folder in folders
        if folder not in [*studies, *trainings]
        for part in ([folder] if folder not in sweeps else _of_sweep(folder))
    ]
    finished = [read_run(folder, metric=metric, cluster=cluster) for folder in evaluations]
    names = {path: name for name, path in named_runs([*studies, *trainings, *evaluations]).items()}
    differing = what_differs({names[run.path]: run for run in finished})
    titles = {
        run.path: ", ".join(filter(None, (model_name(run.record), differing[names[run.path]])))
        for run in finished
    }
    chapters = [_several(finished, names, titles)] if len(finished) > 1 else []
    chapters += [_sweep(folder, f"posts-{number}") for number, folder in enumerate(sweeps, start=1)]
    for number, run in enumerate(finished, start=1):
        chapters.append(
            evaluation_chapter(
                run,
                reader.read(run),
                name=f"run-{number}",
                title=f"{names[run.path]}: {titles[run.path]}",
                room=_ROOM // len(finished),
            )
        )
    for number, folder in enumerate(trainings, start=1):
        chapters.append(training_chapter(folder, names[folder], f"training-{number}"))
    for number, folder in enumerate(studies, start=1):
        chapters.append(
            study_chapter(folder, f"{names[folder]}: methods of personalisation", f"study-{number}")
        )
    shown = [names.get(folder, folder.resolve().name) for folder in folders]
    page = render_page(chapters, title=title or f"Report: {', '.join(shown)}")
    with writing(target), whole_file(target) as file:
        file.write(page.encode("utf-8"))
    return target


def _of_sweep(folder: Path) -> list[Path]:
    """The run folders of `prb evaluate --profile-posts` with several numbers."""
    return [folder / f"posts-{point['profile_posts']}" for point in _points(folder)]


def _points(folder: Path) -> list[dict[str, Any]]:
    points = read_object(folder / _SWEEP, error=RunError).get("points")
    if not isinstance(points, list) or not all(isinstance(p, dict) and "profile_posts" in p for p in points):
        raise RunError(
            f"{folder / _SWEEP}: not of `prb evaluate --profile-posts`: expected points with profile_posts"
        )
    return points


def _sweep(folder: Path, name: str) -> Chapter:
    points, title = _points(folder), f"{folder.resolve().name}: accuracy by posts shown"
    rows = [
        [
            Cell(str(point["profile_posts"]), point["profile_posts"]),
            figure_cell(point.get("accuracy"), point.get("ci95")),
            Cell(signed(point.get("difference"), point.get("difference_ci95")), point.get("difference")),
            figure_cell(point.get("truncated"), form="{:,}"),
        ]
        for point in points
    ]
    heads = ("posts", "accuracy", "minus the fewest posts", "comparisons with cut text")
    drawing = draw_points(
        "Accuracy by posts shown",
        [(str(point["profile_posts"]), point.get("accuracy"), point.get("ci95")) for point in points],
        xlabel="posts of the profile that the model is shown",
        description="The same model and the same comparisons at each point; bars are 95 % intervals.",
    )
    table = PageTable("Accuracy by posts shown", heads, rows, note="The differences are paired.")
    return Chapter(title, name, [Section("The same model, shown more of the profile", [drawing, table])])


def _several(runs: Sequence[FinishedRun], names: Mapping[Path, str], titles: Mapping[Path, str]) -> Chapter:
    summaries = {f"{names[run.path]}: {titles[run.path]}": run.summary for run in runs}
    note = (
        "Each with the interval of its own run; paired differences say more than two intervals side by side."
    )
    blocks: list[Block] = [headline(summaries, title="All runs", note=note)]
    alike: dict[str, list[FinishedRun]] = {}
    for run in runs:
        inputs = run.record["inputs"]
        alike.setdefault(json.dumps([inputs.get("data"), inputs.get("limit")], sort_keys=True), []).append(
            run
        )
    for group in alike.values():
        for run in [run for run in group if run.summary.get("accuracy") is None]:
            group.remove(run)
            blocks.append(Paragraph(f"{names[run.path]}: {run.summary.get('ci95_reason')}.", True))
        if len(group) > 1:
            blocks += _compared(group, names)
        elif group:
            blocks.append(Paragraph(f"{names[group[0].path]}: no other run on the same data.", True))
    return Chapter("All runs", "all", [Section("Comparison", blocks)])


def _compared(runs: Sequence[FinishedRun], names: Mapping[Path, str]) -> list[Block]:
    """Tables of what `prb compare` finds in runs on the same data."""
    found = compare_rows({names[run.path]: run.rows for run in runs}, clusters=runs[0].clusters)
    standings = [
        [
            Cell(str(run["rank_group"]), run["rank_group"]),
            Cell(run["name"]),
            figure_cell(run["accuracy"], run["ci95"]),
        ]
        for run in found["runs"]
    ]
    pairs = [
        [
            Cell(f"{pair['a']} minus {pair['b']}"),
            Cell(signed(pair["difference"], pair["ci95"]), pair["difference"]),
            figure_cell(pair["p"], form="{:.2g}"),
            figure_cell(pair["p_holm"], form="{:.2g}"),
        ]
        for pair in found["pairs"]
    ]
    meanings = COMPARISON_DEFINITIONS
    protocols = sorted({str(run.record["inputs"].get("protocol")) for run in runs})
    across = f" The runs have different protocols: {', '.join(protocols)}." if len(protocols) > 1 else ""
    return [
        PageTable(
            f"Ranks on the same {found['pairs'][0]['n']:,} comparisons",
            ("rank", "run", "accuracy"),
            standings,
            words=2,
            note=f"Rank: {meanings['rank_group']}.{across}",
        ),
        PageTable(
            "Paired differences of accuracy",
            ("on the same comparisons", "difference", "p", "p, Holm"),
            pairs,
            note=f"[..] {meanings['ci95']}. p: {meanings['p']}. p, Holm: {meanings['p_holm']}.",
        ),
    ]


def render_page(chapters: Sequence[Chapter], *, title: str) -> str:
    """Return the HTML of a page in one file, without any address of another one."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from prb_jax.version import __version__

    def shown(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    parts = files("prb_jax.reports")
    style, script = (parts.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=shown, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(parts.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        chapters=chapters,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(sha256(script.encode()).digest()).decode(),
        version=__version__,
    )
