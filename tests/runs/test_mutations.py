"""Folders of strangers: whatever stands in a file of a run, reading it ends, or is one error that says why."""

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import prb_jax as prb
from prb_jax.behaviour.judges.best_of_n import best_of_n
from prb_jax.behaviour.judges.candidates import read_candidates
from prb_jax.building.auditing.folder import open_folder, read_folder
from prb_jax.errors import PrbError
from prb_jax.personal.feature_options import FeatureOptions
from prb_jax.personal.features import open_features
from prb_jax.personal.few_shot.registry import read_settings
from prb_jax.personal.saved import read_fitted, read_states
from prb_jax.reports.comparison import render_comparison
from prb_jax.reports.leaderboard import leaderboard
from prb_jax.reports.leaderboard_shown import FORMATS, render_leaderboard
from prb_jax.runs.behaviour import read_behaviour
from prb_jax.runs.training import METRICS, TRAINING, read_training, run_identity
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.prompt_extras import ASPECT_RUNS, PromptExtras, add_prompt_extras, asked_digest
from prb_jax.study.outcomes import read_outcome
from prb_jax.study.write_features import write_features
from prb_jax.training.logs import read_metrics
from prb_jax.training.record import run_lengths
from tests.json_lines import write_lines
from tests.runs.mutations import mutated
from tests.runs.test_strangers import PAIRS, write_samples
from tests.study.people import QUICK, PlantedRewards, planted_people

Reader = Callable[[Path, Path], Any]
"""Reads a changed folder of a kind; the other one holds the whole folders of all kinds."""


def longer(comparison: prb.Comparison) -> list[float]:
    return [float(len(text) + len(comparison.profile)) for text in comparison.responses]


def show(table: Any) -> None:
    Console(file=io.StringIO()).print(table)


def read_board(folder: Path, whole: Path) -> None:
    entries = leaderboard(folder, controls=True, upper_bounds=True, unfinished=True)
    show(render_leaderboard(entries))
    for form in FORMATS.values():
        form(entries)


def read_study(folder: Path, whole: Path) -> None:
    asked = read_outcome(whole / "study" / "outcomes" / "pooled-0.npz")
    read_outcome(folder / "outcomes" / "offset-0.npz", asked)
    read_fitted(folder / "fitted" / "offset")
    read_states(folder / "states" / "offset", method="offset")


def choose_best(folder: Path, whole: Path) -> None:
    best_of_n(folder, ["baseline:length"], out=folder / "best", quality="baseline:length", progress=False)


def report(folder: Path, whole: Path) -> None:
    prb.report(folder, out=folder / "page.html")


def evaluate_again(folder: Path, whole: Path) -> None:
    prb.evaluate(longer, str(whole / "pairs.jsonl"), out=folder, controls="blind", progress=False)


def compare(folder: Path, whole: Path) -> None:
    show(render_comparison(prb.compare(folder, whole / "other")))


def aspects(folder: Path, whole: Path) -> None:
    add_prompt_extras(read_inputs(str(whole / "pairs.jsonl")), PromptExtras(aspects=f"planned:{folder}"))


KINDS: dict[str, list[Reader]] = {
    "evaluation": [read_board, compare],
    "samples": [lambda folder, whole: read_candidates(folder, None)],
    "best": [
        lambda folder, whole: prb.distil(folder, out=folder / "pairs", samples=whole / "samples"),
        lambda folder, whole: read_behaviour(folder),
    ],
    "training": [
        lambda folder, whole: (read_training(folder), run_identity(folder), run_lengths(folder, 4)),
        lambda folder, whole: read_metrics(folder / METRICS),
    ],
    "features": [lambda folder, whole: open_features(folder).answers.read([0])],
    "audit": [lambda folder, whole: read_folder(folder)],
    "aspects": [aspects],
    "parts": [lambda folder, whole: prb.merge([folder / "1", folder / "2"], out=folder / "merged")],
}
"""What reads each kind of folder."""

SLOW: dict[str, list[Reader]] = {
    "evaluation": [report, evaluate_again],
    "samples": [choose_best],
    "sweep": [report],
    "training": [report],
    "study": [report, read_study],
}
"""Readers, and kinds of folders, of `make test-all`."""

READ = ("*.json", "*.jsonl", "*.npy", "*/*/*.json", "*/*/*.jsonl", "*/*.npz", "[12]/*", "posts-*/*.json*")


def write_training(out: Path) -> None:
    """A finished training run, without a model."""
    out.mkdir()
    session = {"started": "2026-01-01", "settings": {"model": "m", "data": "pairs.jsonl"}}
    inputs = {"settings": {"steps": 4, "seed": 0}, "model": {"files": {}}, "data": {"train": 8}}
    TRAINING.record(out, None, inputs=inputs, session=session, notes={"model": "m"})
    rows = [{"step": n, "loss": 1 / n, "accuracy": 0.5, "margin": 0.1} for n in range(1, 5)]
    write_lines(out / METRICS, [*rows, {"step": 4, "validation_loss": 0.5, "validation_accuracy": 0.5}])
    figures = {"loss": 0.25, "accuracy": 0.5, "margin": 0.1}
    counts = dict.fromkeys(("pairs_seen", "tokens_seen", "parameters", "trained_parameters"), 7)
    ends = {"train_comparisons": 8, "validation_comparisons": 2, "last_tenth": figures, "validation": figures}
    TRAINING.finish(out, {"steps": 4, "exported_step": 4, **counts, **ends})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The whole folders, of all kinds that need no model."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_lines(folder / "pairs.jsonl", PAIRS)
    comparisons = [prb.Comparison(**pair) for pair in PAIRS]
    evaluate_again(folder / "evaluation", folder)
    prb.evaluate("baseline:length", data, out=folder / "other", progress=False)
    write_samples(folder / "samples", data)
    choose_best(folder / "samples", folder)
    (folder / "samples" / "best").rename(folder / "best")
    write_training(folder / "training")
    source = PlantedRewards(set())
    people = planted_people(source, users=20, each=8)
    options = FeatureOptions(profile_posts=1, file_rows=50)
    write_features(source, people, out=folder / "features", options=options, progress=False)
    (folder / "audit").mkdir()
    open_folder(folder / "audit", data=[data])
    inputs = {"model": {"name": "planner"}, "data": {}}
    with ASPECT_RUNS.open(folder / "aspects", inputs, notes={"model": "planner"}) as run:
        rows = [{"id": one.id, "asked": asked_digest(one), "text": "short"} for one in comparisons]
        run.file.append(row | {"tokens": None, "posts_dropped": 0} for row in rows)
        run.finish({})
    for number in ("1", "2"):
        place = folder / "parts" / number
        prb.evaluate(longer, data, out=place, part=f"{number}/2", controls="blind", progress=False)
    return folder


@pytest.fixture(scope="module")
def slow(whole) -> Path:
    """The same, and those that take long to make."""
    settings = read_settings(QUICK)
    people = planted_people(PlantedRewards(set()), users=20, each=8)
    chosen = {"methods": ["offset"], "shots": (0, 2), "settings": settings, "progress": False}
    prb.personalise(people, backbone=whole / "features", out=whole / "study", **chosen)
    data = str(whole / "pairs.jsonl")
    for posts, name in enumerate(("length", "random")):
        prb.evaluate(f"baseline:{name}", data, out=whole / "sweep" / f"posts-{posts}", progress=False)
    points = [{"profile_posts": 0}, {"profile_posts": 1}]
    write_lines(whole / "sweep" / "posts.json", [{"points": points}])
    return whole


def unseal(folder: Path) -> None:
    """Make the records in a folder those of an earlier version, which had no digests."""
    for path in folder.rglob("*.json"):
        record = json.loads(path.read_text())
        if path.name in ("run.json", "train.json"):
            record = {name: value for name, value in record.items() if name != "files"} | {"format": 1}
        elif path.name in ("personalised.json", "states.json"):
            del record["facts_digest"]
            record["format"] -= 1
        elif path.name == "part.json":
            del record["digests"]
        path.write_text(json.dumps(record))


def check(kind: str, readers: list[Reader], whole: Path, work: Path, *, count: int, seed: int) -> None:
    """Change a file of a copy of a folder so often, and read it in every way."""
    rng = random.Random(seed)
    for form in ("sealed", "earlier"):
        shutil.copytree(whole / kind, work / form)
    unseal(work / "earlier")
    names = sorted(
        path.relative_to(whole / kind)
        for path in {path for pattern in READ for path in (whole / kind).glob(pattern)}
        if path.is_file() and path.stat().st_size
    )
    for number in range(count):
        form, name = rng.choice(("sealed", "earlier", "earlier")), rng.choice(names)
        contents = mutated(work / form / name, rng)
        for place, reader in enumerate(readers):
            copy = shutil.copytree(work / form, work / f"{number}-{place}")
            (copy / name).write_bytes(contents)
            try:
                reader(copy, whole)
            except PrbError:
                pass
            except Exception as error:
                raise AssertionError(f"{form} {kind}/{name}: change {number}: {contents[:2000]!r}") from error
            shutil.rmtree(copy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused(kind, whole, tmp_path):
    for reader in KINDS[kind]:  # a whole folder is read, also one of an earlier version
        copy = shutil.copytree(whole / kind, tmp_path / "copy")
        reader(copy, whole)
        shutil.rmtree(copy)
        copy = shutil.copytree(whole / kind, tmp_path / "copy")
        unseal(copy)
        reader(copy, whole)
        shutil.rmtree(copy)
    check(kind, KINDS[kind], whole, tmp_path, count=20, seed=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in {**KINDS, **SLOW} for seed in (2, 3)])
def test_many_changed_files_are_read_or_refused(kind, seed, slow, tmp_path):
    readers = [*KINDS.get(kind, []), *SLOW.get(kind, [])]
    check(kind, readers, slow, tmp_path, count=200, seed=seed)
