"""Every kind of run folder: interrupted at any write, the same command ends with the same bytes.

Most verbs run in this process, where a write ends them: half a row is written, or a whole file has not taken its name.
`prb evaluate`, `prb train` and `prb ppo` are also killed as processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.generation.policy_accuracy import policy_accuracy
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.sample import sample_data
from prb_jax.building.settings import GATES
from prb_jax.personal.feature_options import FeatureOptions
from prb_jax.personal.few_shot.registry import read_settings
from prb_jax.records.writing import json_line
from prb_jax.runs.rows import RowFile
from prb_jax.runs.training import METRICS
from prb_jax.scoring import plain
from prb_jax.study.write_features import write_features
from prb_jax.training.logs import StepFile
from tests.behaviour.judges.stand_in import Answer, StandIn, comparisons, judged, stand_in
from tests.behaviour.rl import tiny as rl
from tests.building.engine import engine, record
from tests.building.test_build import config as build_config
from tests.json_lines import read_lines, write_lines
from tests.plain_process import ROOT, plain_environment, prb_command
from tests.platform.processes.jobs import lines
from tests.runs.test_strangers import PAIRS, write_samples
from tests.scoring.large_process import read_by_windows
from tests.scoring.slow_scorer import SlowScorer
from tests.scoring.slow_scorer import comparisons as lettered
from tests.study.people import QUICK, PlantedRewards, planted_people
from tests.tiny_encoders import write_encoder
from tests.tiny_policies import write_policy
from tests.training import tiny

Verb = Callable[[Path], Any]
"""Runs a verb into a folder."""

COUNT = 600
RECORDS = ("run.json", "train.json")
CLOCK = ("second", "seconds", "mfu", "seconds_fit", "seconds_adapt_per_user", "disk_bytes_per_user")


class Interrupted(BaseException):
    """The process ends here; no code of the package expects it."""


class Writes:
    """Count every append of rows and every file that takes its name, and end the process at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, last: int | None = None) -> None:
        self.count, self.last = 0, last
        append, write, rename = RowFile.append, StepFile.write, os.replace

        def appended(file: RowFile[Any], rows: Iterable[Any], **options: Any) -> None:
            rows = list(rows)
            if rows:
                self.begin(file.path, torn=json_line(file.kind.encode(rows[0]))[:-7])
            append(file, rows, **options)

        def written(file: StepFile, *rows: Any) -> None:
            self.begin(file.path, torn=b'{"step": 1, "lo')
            write(file, *rows)

        def renamed(source: Any, target: Any, **options: Any) -> None:
            self.begin(Path(target))
            rename(source, target, **options)

        monkeypatch.setattr(RowFile, "append", appended)
        monkeypatch.setattr(StepFile, "write", written)
        monkeypatch.setattr(os, "replace", renamed)

    def begin(self, path: Path, *, torn: bytes = b"") -> None:
        self.count += 1
        if self.count == self.last:
            if torn:
                with path.open("ab") as file:
                    file.write(torn)
            raise Interrupted


def untimed(value: Any) -> Any:
    """JSON without the numbers of the clock."""
    if isinstance(value, dict):
        return {key: untimed(one) for key, one in value.items() if not key.endswith(CLOCK)}
    return [untimed(one) for one in value] if isinstance(value, list) else value


def contents(out: Path) -> dict[str, Any]:
    """Every file of a run by its name, without times: those of orbax have times in their bytes, and are left out."""
    found: dict[str, Any] = {}
    for path in (path for path in out.rglob("*") if path.is_file()):
        name, data = path.relative_to(out), path.read_bytes()
        if not {"checkpoints", "arrays"} & set(name.parts):
            if path.name in RECORDS:
                data = {key: json.loads(data)[key] for key in ("kind", "inputs", "format")}
            elif path.suffix == ".json":
                data = untimed(json.loads(data))
            elif path.name == METRICS:
                data = untimed(read_lines(path))
            elif path.suffix == ".npz":
                with np.load(path) as arrays:
                    data = {key: arrays[key].tobytes() for key in arrays.files if key != "facts"}
            found[str(name)] = data
    return found


@dataclass(frozen=True)
class Place:
    """Where a case of the table writes its data, and what ends with the test."""

    folder: Path
    patch: pytest.MonkeyPatch
    stack: ExitStack

    def data(self, rows: Iterable[Any]) -> str:
        return write_lines(self.folder / "data.jsonl", rows)

    def endpoint(self, reply: Callable[[Any, int], str | Answer], **options: Any) -> StandIn:
        return self.stack.enter_context(stand_in(reply, **options))


def at(server: StandIn) -> prb.EndpointOptions:
    return prb.EndpointOptions(url=server.url, model="m", backoff=0.01, concurrency=2)


def tiny_policy(place: Place) -> prb.Policy:
    write_policy(place.folder / "policy", "qwen3", eos=3, num_hidden_layers=1)
    return prb.load_policy(place.folder / "policy")


def evaluation(place: Place) -> Verb:
    """Batches out of order, and two controls."""
    rows = lettered(24)
    return lambda out: prb.evaluate(SlowScorer(), rows, out=out, controls="all", progress=False)


def large_evaluation(place: Place) -> Verb:
    """A file that is read while it is scored, and remembered block by block."""
    place.patch.setattr(plain, "_BATCH", 8)
    read_by_windows(partial(place.patch.setattr, raising=False), block=1 << 10)
    data = place.data(PAIRS)
    return lambda out: prb.evaluate("baseline:length", data, out=out, progress=False)


def encoder(place: Place) -> Verb:
    """Equal sequences are computed once, wherever they are."""
    write_encoder(place.folder / "model", "DebertaV2ForSequenceClassification", num_labels=1)
    model, rows = (
        prb.load(place.folder / "model", mesh="data=1"),
        comparisons(24, ["tea is good", "soup is bad"]),
    )
    options = {"profile_posts": 0, "batch_tokens": 64, "controls": "none", "progress": False}
    return lambda out: prb.evaluate(model, rows, out=out, **options)


def sampling(place: Place) -> Verb:
    policy, data = tiny_policy(place), place.data(PAIRS[:14])
    options = SampleOptions(n=2, temperature=0.7, max_new_tokens=8)
    return lambda out: sample_data(policy, data, out=out, options=options, rows=4, progress=False)


def best(place: Place) -> Verb:
    samples = write_samples(place.folder / "samples", place.data(PAIRS))
    options = {"quality": "baseline:length", "progress": False}
    return lambda out: prb.best_of_n(samples, ["baseline:length", "baseline:random"], out=out, **options)


def judging(place: Place) -> Verb:
    server, rows = place.endpoint(lambda text, _: "A"), comparisons(6)
    return lambda out: judged(server, rows, out, profile_posts=1)


def planning(place: Place) -> Verb:
    server, data = place.endpoint(lambda text, _: f"- {len(text)}\n"), place.data(PAIRS[:6])
    return lambda out: prb.plan_aspects(None, data, out=out, endpoint=at(server), progress=False)


def building(place: Place) -> Verb:
    reply, data = engine(), place.data(record(number) for number in range(8))
    server = place.endpoint(lambda body, _: reply(body), whole=True)
    config = build_config(server, data, relax=GATES)
    return lambda out: prb.build(config, out=out, progress=False)


def features(place: Place) -> Verb:
    source = PlantedRewards(set())
    people, options = planted_people(source, users=4, each=4), FeatureOptions(profile_posts=1, file_rows=8)
    return lambda out: write_features(source, people, out=out, options=options, progress=False)


def study(place: Place) -> Verb:
    source, store = PlantedRewards(set()), place.folder / "store"
    people = planted_people(source, users=20, each=6)
    write_features(source, people, out=store, progress=False)
    chosen = {"methods": ["pooled", "offset"], "shots": (0, 2), "settings": read_settings(QUICK)}
    return lambda out: prb.personalise(people, backbone=store, out=out, progress=False, **chosen)


def policy_scores(place: Place) -> Verb:
    policy, data = tiny_policy(place), place.data(PAIRS[:14])
    return lambda out: policy_accuracy(policy, ["baseline:length"], data, out=out, progress=False)


def training(place: Place) -> Verb:
    model = tiny.write_model(place.folder / "model")
    settings = tiny.config(
        model, place.data(tiny.rows(24)), steps=4, checkpoint__every=1, log__tensorboard=False
    )
    return lambda out: prb.train(settings, out=out, progress=False)


def policy_training(place: Place) -> Verb:
    rl.write_tiny_policy(place.folder / "model")
    settings = rl.settings(place.folder / "model", steps=2)
    return lambda out: prb.ppo(
        settings, out=out, data=rl.comparisons(4), reward=rl.has_letter, progress=False
    )


KINDS = (
    evaluation, large_evaluation, encoder, sampling, best, judging, planning, building, features, study, training,
    policy_training, policy_scores,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::prb_jax.PrbWarning")
@pytest.mark.parametrize("moments", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_ended_at_a_write_the_same_call_ends_with_the_same_bytes(
    kind: Callable[[Place], Verb], moments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        verb = kind(Place(tmp_path, monkeypatch, stack))
        with monkeypatch.context() as patch:
            writes = Writes(patch)
            verb(tmp_path / "whole")
        expected = contents(tmp_path / "whole")
        for last in sorted(set(np.linspace(2, writes.count, moments).round().astype(int).tolist())):
            out = tmp_path / str(last)
            with monkeypatch.context() as patch:
                Writes(patch, last=last)
                with pytest.raises(Interrupted):
                    verb(out)
            verb(out)
            assert contents(out) == expected, f"write {last} of {writes.count}"


def evaluate_command(place: Path) -> list[object]:
    """More comparisons than a window of the stream."""
    model, data = tiny.write_model(place / "model"), tiny.write_rows(place / "data.jsonl", tiny.rows(COUNT))
    return ["evaluate", model, "--data", data, "--batch-tokens", 1024]


def train_command(place: Path) -> list[object]:
    model, data = tiny.write_model(place / "model"), tiny.write_rows(place / "data.jsonl", tiny.rows(24))
    run = "steps=12 batch.comparisons=8 checkpoint.every=2 validation.every=6 log.plot=false log.tensorboard=false"
    return ["train", "configs/bt_profile_context.py", f"model={model}", f"data={data}", *run.split()]


def ppo_command(place: Path) -> list[object]:
    rl.write_tiny_policy(place / "model")
    given = {"data": str(rl.write_rows(place / "data.jsonl")), "reward": rl.write_reward(place)}
    return ["ppo", rl.write_config(place, rl.settings(place / "model", steps=6) | given)]


@pytest.mark.parametrize(
    ("command", "file", "rows"),
    [(evaluate_command, "scores.jsonl", 150), (train_command, METRICS, 5), (ppo_command, METRICS, 2)],
    ids=["evaluate", "train", "ppo"],
)
def test_killed_as_a_process_the_same_command_ends_with_the_same_bytes(
    command: Callable[[Path], list[object]], file: str, rows: int, tmp_path: Path
) -> None:
    words = [*command(tmp_path), "--no-progress", "--out"]
    assert cli.main([*map(str, words), str(tmp_path / "whole")]) == 0
    out, environment = tmp_path / "killed", plain_environment() | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(prb_command(*words, out), cwd=ROOT, env=environment)
    try:
        while lines(out / file) < rows:
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert not (out / "summary.json").exists()
    assert cli.main([*map(str, words), str(out)]) == 0
    assert contents(out) == contents(tmp_path / "whole")
    (record,) = (out / name for name in RECORDS if (out / name).exists())
    assert len(json.loads(record.read_text())["sessions"]) == 2
