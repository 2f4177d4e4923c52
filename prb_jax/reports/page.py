"""`prb report`: one page of one or several runs, in one file that needs nothing else."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError
from prb_jax.metrics.paired import COMPARISON_DEFINITIONS, compare_rows
from prb_jax.reports.blocks import Block, Cell, Chapter, PageTable, Paragraph, Preformatted, Section, visible
from prb_jax.reports.cells import figure_cell, headline, last_figures
from prb_jax.reports.drawings import draw_curves
from prb_jax.reports.evaluation import evaluation_chapter, manifest
from prb_jax.reports.style import signed
from prb_jax.reports.texts import TextReader
from prb_jax.runs.finished import FinishedRun, read_finished

_TRAINING = "train.json"
_ROOM = 1_200_000  # bytes of texts of pairs, of all runs together


def report(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    data: str | Path | Sequence[str | Path] = (),
    title: str = "",
) -> Path:
    """Write a page about runs: their figures with intervals, comparisons of them, and the pairs to read.

    The page is one file without any address of another one. The texts of comparisons are read from the data of each
    run; where those are gone or have changed, the page says so and shows the figures alone.

    Args:
      runs: folders of `prb evaluate`, and of `prb train` for learning curves; one or several.
      out: the file, with a name that ends in .html; it is replaced where it exists.
      data: where the data of the runs lie now, as `prb_jax.evaluate` takes them; the names that each run was given,
        if there are none.
      title: of the page; the names of the runs if there is none.

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
    twice = [folder for place, folder in enumerate(folders) if folder in folders[:place]]
    if twice:
        raise RunError(f"{twice[0]}: given twice as a run")
    places = [data] if isinstance(data, str | Path) else list(data)
    reader = TextReader([str(place) for place in places])
    trainings = [folder for folder in folders if (folder / _TRAINING).is_file()]
    finished = [read_finished(folder) for folder in folders if folder not in trainings]
    names = _names([*trainings, *(run.path for run in finished)])
    chapters = [_several(finished, names)] if len(finished) > 1 else []
    for number, run in enumerate(finished, start=1):
        chapters.append(
            evaluation_chapter(
                run,
                reader.read(run),
                name=f"run-{number}",
                title=f"{names[run.path]}: {run.summary.get('model')}",
                room=_ROOM // len(finished),
            )
        )
    chapters += [_training(folder, names[folder], number) for number, folder in enumerate(trainings, start=1)]
    page = _render(chapters, title=title or f"Report: {', '.join(names[folder] for folder in folders)}")
    with writing(target), whole_file(target) as file:
        file.write(page.encode("utf-8"))
    return target


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, or the whole path where that is not enough to tell them apart."""
    last = [folder.resolve().name for folder in folders]
    return {folder: name if last.count(name) == 1 else str(folder) for folder, name in zip(folders, last)}


def _several(runs: Sequence[FinishedRun], names: dict[Path, str]) -> Chapter:
    summaries = {names[run.path]: run.summary for run in runs}
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
        if len(group) > 1:
            blocks += _compared(group, names)
        else:
            blocks.append(Paragraph(f"{names[group[0].path]}: no other run on the same data.", True))
    return Chapter("All runs", "all", [Section("Comparison", blocks)])


def _compared(runs: Sequence[FinishedRun], names: dict[Path, str]) -> list[Block]:
    """Tables of what `prb compare` finds in runs on the same data."""
    found = compare_rows({names[run.path]: run.rows for run in runs})
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


def _training(folder: Path, name: str, number: int) -> Chapter:
    from prb_jax.training.folder import is_finished, read_summary, read_training
    from prb_jax.training.logs import METRICS, read_metrics

    record = read_training(folder)
    assert record is not None
    rows = read_metrics(folder / METRICS)
    blocks: list[Block] = []
    if not is_finished(folder):
        blocks.append(Paragraph("The training run is not finished: the curves end where it stands.", True))
    if rows:
        blocks.append(draw_curves(rows))
    else:
        blocks.append(Paragraph("No step is recorded yet.", True))
    if is_finished(folder):
        blocks.append(last_figures(read_summary(folder)))
    made: list[Block] = []
    command = record.get("command")
    if isinstance(command, list) and command:
        made.append(Preformatted("The command that repeats it", shlex.join(map(str, command))))
    made += manifest(record, _TRAINING)
    sections = [Section("Learning curves", blocks), Section("How it was made", made)]
    return Chapter(f"{name}: training", f"training-{number}", sections)


def _render(chapters: Sequence[Chapter], *, title: str) -> str:
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
