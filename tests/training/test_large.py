"""Training data larger than memory: the same curve from windows, from tokens on disk, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records import files
from prb_jax.records.sources.prepare import prepare
from prb_jax.records.sources.prepared import PreparedComparisons
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.write_tokens import TokensJob, write_store
from prb_jax.text.view import ViewOptions
from prb_jax.training.config import default_config, load_settings
from prb_jax.training.data import read_training_data
from prb_jax.training.microbatches import TreesOnDemand
from prb_jax.training.train import train
from tests.training.tiny import config, curve, rows, stopped_at, write_rows

COUNT, STEPS, AT_A_TIME = 300, 6, 8


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows(COUNT, users=30))


def wanted(model: Path, data: Path, **changes):
    given = {"steps": STEPS, "tuning": "head", "method": "profile_context", "batch__comparisons": AT_A_TIME}
    return config(model, data, **given, validation__every=3, validation__limit=10, **changes)


def numbers(out: Path):
    return curve(out, "loss", "accuracy", "margin", "grad_norm"), curve(out, "validation_loss")


def summary_of(out: Path):
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def held(model, data, tmp_path_factory) -> Path:
    """The run of the same data in memory."""
    return train(wanted(model, data), out=tmp_path_factory.mktemp("runs") / "held", progress=False).out


def test_a_prepared_folder_gives_the_same_curve_and_the_trees_of_a_step_are_held(
    model, data, held, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "LARGE", 1)
    prepare([str(data)], out=tmp_path / "data", splits=("train",))
    most: list[int] = []
    at = TreesOnDemand.at

    def counted(self: TreesOnDemand, places):
        of_step = at(self, places)
        most.append(len(self._held))
        return of_step

    chosen = wanted(model, tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(TreesOnDemand, "at", counted)
        with stopped_at(monkeypatch, 3):
            train(chosen, out=tmp_path / "run", progress=False)
        assert most.count(AT_A_TIME) >= 3
        assert max(most) <= 256 < COUNT  # 256: the lengths of the first steps
    summary = train(chosen, out=tmp_path / "run", progress=False).summary
    assert numbers(tmp_path / "run") == numbers(held)
    assert summary["truncated"] is None
    assert summary["train_comparisons"] == summary_of(held)["train_comparisons"]


def test_raw_files_are_held_in_memory_or_refused_in_one_line(data, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGE", 1)
    given = ["model=m", "validation.fraction=0", "limit=50"]
    settings = load_settings(default_config(), [*given, f"data={data}"])
    assert len(read_training_data(settings).train) == 50
    folder = prepare([str(data)], out=tmp_path / "data", splits=("train",)).folder
    monkeypatch.setattr(files, "HELD", 1)
    with pytest.raises(prb.DataError, match=r"pairs.jsonl: too large .* `prb prepare --data .* --out DIR`"):
        read_training_data(settings)
    prepared = read_training_data(load_settings(default_config(), [*given, f"data={folder}"])).train
    assert not isinstance(prepared.comparisons, list)
    assert [known.id for known in prepared.known] == [one.id for one in prepared.comparisons]
    assert len(prepared) == 50


def test_tokens_give_the_same_curve_and_no_text_is_read(model, data, held, tmp_path, monkeypatch):
    prepared = prepare([str(data)], out=tmp_path / "out", splits=("train",)).folder
    view = ViewOptions(profile_posts=10)
    job = TokensJob(model=str(model), loading=LoadOptions(), view=view, folder=prepared)
    write_store(job, split="train")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("text was read")

    monkeypatch.setattr(Reader, "encode_text", never)
    monkeypatch.setattr(PreparedComparisons, "__getitem__", never)
    done = train(wanted(model, tmp_path / "out"), out=tmp_path / "run", progress=False)
    assert numbers(done.out) == numbers(held)
    assert done.summary["truncated"] == summary_of(held)["truncated"]
    with pytest.raises(prb.DataError, match=r"prepared for another model or view .*profile_posts"):
        train(wanted(model, tmp_path / "out", profile_posts=1), out=tmp_path / "other", progress=False)
