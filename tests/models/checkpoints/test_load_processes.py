"""Loading over several devices and processes, and its memory: each in processes of its own."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prb_jax.models.checkpoints.hf_map import leaf_maps
from prb_jax.models.config.decoder import load_config
from prb_jax.models.lora_config import LoraConfig
from tests.plain_process import free_port
from tests.sweeps import sweep
from tests.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads memory sizes from /proc")


def start(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.models.checkpoints.loading_process", str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process: subprocess.Popen[str], *, meshes: int = 1) -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    return [json.loads(line) for line in output.splitlines()[-meshes:]]


def load(folder: Path, *arguments: str) -> dict[str, Any]:
    return results(start(folder, arguments))[0]


def load_together(folder: Path, count: int, *arguments: str) -> list[dict[str, Any]]:
    """What each process of one job saw."""
    shared = [*arguments, "--processes", str(count), "--port", str(free_port())]
    processes = [start(folder, [*shared, "--process", str(number)]) for number in range(count)]
    return [results(process)[0] for process in processes]


def expected_sums(folder: Path) -> dict[str, float]:
    """The sums that ``loading_process`` prints, from the file itself."""
    tensors = load_file(folder / "model.safetensors")
    sums = {}
    for leaf in leaf_maps(load_config(folder)):
        parts = [tensors[key].astype(np.float64) for key in leaf.file_keys]
        parts = [part.T if leaf.transposed else part for part in parts]
        values = np.stack(parts) if leaf.stacked else parts[0]
        weight = sum(
            (axis + 1) * np.cos(grid) for axis, grid in enumerate(np.ogrid[tuple(map(slice, leaf.shape))])
        )
        sums["".join(f"['{part}']" for part in leaf.path)] = float((values * weight).sum())
    return sums


def assert_sums(sums: dict[str, float], expected: dict[str, float]) -> None:
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(sums[name], value, rel_tol=1e-9, abs_tol=1e-7), name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", dtype="bfloat16")


def test_shards_over_four_devices(tiny: Path) -> None:
    meshes = ["1,4,1", "1,1,4", "1,2,2", "4,1,1"]
    process = start(tiny, ["--mesh", *meshes, "--devices", "4", "--dtype", "float32"])
    tensors = load_file(tiny / "model.safetensors")
    for seen in results(process, meshes=len(meshes)):
        assert seen["sharded"]
        assert_sums(seen["sums"], expected_sums(tiny))
        # every byte once, also when several devices hold the same part
        assert seen["bytes_read"] == sum(value.nbytes for value in tensors.values())
        assert not seen["torch"]
        assert not seen["transformers"]


@pytest.mark.parametrize(("count", "devices"), sweep([(2, 2), (4, 1)], few=(0,)))
def test_each_process_reads_only_its_part(tiny: Path, count: int, devices: int) -> None:
    arguments = ["--mesh", "1,4,1", "--devices", str(devices), "--dtype", "float32"]
    seen = load_together(tiny, count, *arguments)
    tensors = load_file(tiny / "model.safetensors")
    # replicated: stacked vectors (their first axis is the layers) and the head
    shared = {n: v for n, v in tensors.items() if v.ndim == 1 or n == "score.weight"}
    shared_bytes = sum(value.nbytes for value in shared.values())
    split_bytes = sum(value.nbytes for value in tensors.values()) - shared_bytes
    assert [one["bytes_read"] for one in seen] == [shared_bytes + split_bytes // count] * count
    expected = {
        name: value * (count if any(part in name for part in ("norm", "bias", "score")) else 1)
        for name, value in expected_sums(tiny).items()
    }
    assert_sums({name: sum(one["sums"][name] for one in seen) for name in expected}, expected)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint of 240 MiB, half of it in one stacked kind of matrix and the embedding."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"vocab_size": 40_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 7}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_labels": 1, "torch_dtype": "bfloat16"}
    kind = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(kind | sizes | heads))
    pattern = np.arange(50_000_000, dtype=np.uint16) % 16_000  # small positive numbers in bfloat16
    tensors = {
        key: pattern[start : start + math.prod(leaf.file_shape)]
        .reshape(leaf.file_shape)
        .view(ml_dtypes.bfloat16)
        for leaf in leaf_maps(load_config(folder))
        for start, key in enumerate(leaf.file_keys)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    sweep(
        [("1,1,1", "bfloat16"), ("1,2,2", "bfloat16"), ("1,1,4", "float32"), ("2,1,1", "bfloat16")], few=(1,)
    ),
)
def test_peak_memory_is_the_shards(mesh: str, dtype: str, large: Path) -> None:
    devices = str(math.prod(map(int, mesh.split(","))))
    seen = load(large, "--mesh", mesh, "--devices", devices, "--dtype", dtype, "--memory-only")
    stored = (large / "model.safetensors").stat().st_size
    assert stored > 200 * MIB
    assert seen["local"] > 0.99 * stored * (2 if dtype == "float32" else 1)
    # and it did hold them: the measure is not blind
    assert 0.9 * seen["local"] < seen["peak"] < 1.3 * seen["local"]
    assert not seen["torch"]


@pytest.mark.parametrize(("devices", "mesh"), sweep([("1", "1,1,1"), ("4", "1,2,2")], few=(1,)))
def test_peak_memory_is_the_quantised_shards(devices: str, mesh: str, large: Path) -> None:
    """No matrix is ever there in its own dtype as a whole: the largest has a third of the checkpoint's bytes."""
    seen = load(large, "--mesh", mesh, "--devices", devices, "--quantize", "int8", "--memory-only")
    tensors = load_file(large / "model.safetensors")
    quantised = [value for name, value in tensors.items() if name.endswith("proj.weight")]
    matrices, channels = sum(value.size for value in quantised), sum(len(value) for value in quantised)
    rest = sum(value.nbytes for value in tensors.values()) - 2 * matrices
    assert seen["sharded"]
    # On each device the head and the norms lie whole; shards that are equal count once.
    assert seen["local"] == matrices + rest + 4 * channels
    assert seen["bytes_read"] == 2 * matrices + rest  # every byte once, though shards split the inputs
    assert seen["peak"] < 1.3 * seen["local"]
    assert not seen["torch"]


@pytest.mark.slow
def test_quantised_shards_over_two_processes(tiny: Path) -> None:
    """The same integers and scales as in one process. Inputs that the processes split are read by both."""
    form = ["--quantize", "int8", "--dtype", "float32"]
    seen = load_together(tiny, 2, *form, "--mesh", "1,4,1", "--devices", "2")
    alone = load(tiny, *form, "--mesh", "1,1,1", "--devices", "1")
    split = {"['embed']", *(f"['layers']['{matrix}']" for matrix in LoraConfig.targets)}
    totals = {name: sum(one["sums"][name] for one in seen) for name in alone["sums"]}
    means = {name: total / (1 if name in split else 2) for name, total in totals.items()}
    assert_sums(means, alone["sums"])
    embed = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"].nbytes
    assert [one["bytes_read"] for one in seen] == [alone["bytes_read"] - embed // 2] * 2
