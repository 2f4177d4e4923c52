"""Folders of data with a model, through real processes: torch is neither needed nor imported."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plain_process import ROOT
from tests.sweeps import sweep
from tests.training.tiny import rows, write_rows

CODE = """
import os, sys
from prb_jax.cli import main
status = main()
file = os.environ["FILE"]
if file:
    import datasets
    datasets.load_dataset("json", data_files=file, split="train", cache_dir=file + ".cache")
print(f"status {status}, torch imported: {'torch' in sys.modules}")
if file:
    import torch  # an import of somebody else still works
"""


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder with two splits, each in files of two kinds."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, some in (("train", rows(16)), ("test", rows(8, seed=1))):
        write_rows(folder / f"{split}-0.jsonl", some[:3])
        with (folder / f"{split}-1.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, some[0])
            writer.writeheader()
            writer.writerows(row | {"profile": json.dumps(row["profile"])} for row in some[3:])
    return folder


@pytest.mark.parametrize("verb", sweep(["evaluate", "inspect", "train"], few=(0,)))
def test_a_folder_is_read_whole_without_torch(verb, model, data, tmp_path):
    out = tmp_path / "out"
    arguments = {
        "evaluate": ["evaluate", model, "--data", data, "--out", out],
        "inspect": ["inspect", model, "--data", data],
        "train": [
            "train", "configs/bt_user_blind.py", f"model={model}", f"data={data}", "steps=1",
            "batch.comparisons=4", "validation.fraction=0", "log.plot=false", "--out", out,
        ],
    }[verb]  # fmt: skip
    file = str(data / "test-0.jsonl") if verb == "inspect" else ""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "FILE": file}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "status 0, torch imported: False" in done.stdout
    if verb == "evaluate":
        assert len((out / "scores.jsonl").read_text().splitlines()) == 8
        (source,) = json.loads((out / "run.json").read_text())["inputs"]["data"]["sources"]
        assert sorted(source["files"]) == ["test-0.jsonl", "test-1.csv"]
    elif verb == "inspect":
        assert "8 comparisons" in done.stdout
    else:
        trained = json.loads((out / "train.json").read_text())["inputs"]["data"]
        assert trained["train"] == 16
        assert sorted(trained["sources"]["data"][0]["files"]) == ["train-0.jsonl", "train-1.csv"]
