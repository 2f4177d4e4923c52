"""Loading over several devices and processes, and its memory: each in processes of its own."""

import json
import math
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prb_jax.checkpoints.hf_map import leaf_maps
from prb_jax.models.config.decoder import load_config
from prb_jax.models.quantization import MATRICES
from tests.sweeps import sweep
from tests.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads memory sizes from /proc")


def start(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.checkpoints.loading_process", str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(process: subprocess.Popen[str], *, meshes: int = 1) -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    return [json.loads(line) for line in output.splitlines()[-meshes:]]


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    (found,) = results(process)
    return found


def load(folder: Path, *arguments: str) -> dict[str, Any]:
    return result(start(folder, arguments))


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


def assert_sums(found: dict[str, float], folder: Path) -> None:
    expected = expected_sums(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(found[name], value, rel_tol=1e-9, abs_tol=1e-7), name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", dtype="bfloat16")


def test_shards_over_four_devices(tiny: Path) -> None:
    meshes = ["1,4,1", "1,1,4", "1,2,2", "4,1,1"]
    process = start(tiny, ["--mesh", *meshes, "--devices", "4", "--dtype", "float32"])
    tensors = load_file(tiny / "model.safetensors")
    for found in results(process, meshes=len(meshes)):
        assert found["sharded"]
        assert_sums(found["sums"], tiny)
        # every byte once, also when several devices hold the same part
        assert found["bytes_read"] == sum(value.nbytes for value in tensors.values())
        assert not found["torch"]
        assert not found["transformers"]


@pytest.mark.parametrize(("count", "devices"), sweep([(2, 2), (4, 1)], few=(0,)))
def test_each_process_reads_only_its_part(tiny: Path, count: int, devices: int) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    arguments = [
        "--mesh",
        "1,4,1",
        "--devices",
        str(devices),
        "--dtype",
        "float32",
        "--processes",
        str(count),
        "--port",
        port,
    ]
    processes = [start(tiny, [*arguments, "--process", str(number)]) for number in range(count)]
    found = [result(process) for process in processes]
    tensors = load_file(tiny / "model.safetensors")
    # replicated: stacked vectors (their first axis is the layers) and the head
    shared = {n: v for n, v in tensors.items() if v.ndim == 1 or n == "score.weight"}
    shared_bytes = sum(value.nbytes for value in shared.values())
    split_bytes = sum(value.nbytes for value in tensors.values()) - shared_bytes
    assert [one["bytes_read"] for one in found] == [shared_bytes + split_bytes // count] * count
    for name, value in expected_sums(tiny).items():
        total = sum(one["sums"][name] for one in found)
        is_split = not any(part in name for part in ("norm", "bias", "score"))
        assert math.isclose(total, value if is_split else count * value, rel_tol=1e-9, abs_tol=1e-7), name


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint of 240 MiB, half of it in one stacked kind of matrix and the embedding."""
    folder = tmp_path_factory.mktemp("large")
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForSequenceClassification"],
        "vocab_size": 40_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 7,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_labels": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(raw))
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
    ("devices", "mesh", "dtype"),
    [
        ("1", "1,1,1", "bfloat16"),
        ("4", "1,2,2", "bfloat16"),
        ("4", "1,1,4", "float32"),
        ("2", "2,1,1", "bfloat16"),
    ],
)
def test_peak_memory_is_the_shards(devices: str, mesh: str, dtype: str, large: Path) -> None:
    found = load(large, "--mesh", mesh, "--devices", devices, "--dtype", dtype, "--memory-only")
    stored = (large / "model.safetensors").stat().st_size
    assert stored > 200 * MIB
    assert found["local"] > 0.99 * stored * (2 if dtype == "float32" else 1)
    assert found["peak"] < 1.3 * found["local"]
    # and it did hold them: the measure is not blind
    assert found["peak"] > 0.9 * found["local"]
    assert not found["torch"]


@pytest.mark.parametrize(("devices", "mesh"), [("1", "1,1,1"), ("4", "1,2,2")])
def test_peak_memory_is_the_quantised_shards(devices: str, mesh: str, large: Path) -> None:
    """No matrix is ever there in its own dtype as a whole: the largest has a third of the checkpoint's bytes."""
    found = load(large, "--mesh", mesh, "--devices", devices, "--quantize", "int8", "--memory-only")
    tensors = load_file(large / "model.safetensors")
    matrices = sum(value.size for name, value in tensors.items() if name.endswith("proj.weight"))
    channels = sum(value.shape[0] for name, value in tensors.items() if name.endswith("proj.weight"))
    rest = sum(value.nbytes for name, value in tensors.items() if not name.endswith("proj.weight"))
    assert found["sharded"]
    # On each device the head and the norms lie whole; shards that are equal count once.
    assert found["local"] == matrices + rest + 4 * channels
    assert found["bytes_read"] == 2 * matrices + rest  # every byte once, though shards split the inputs
    assert found["peak"] < 1.3 * found["local"]
    assert not found["torch"]


@pytest.mark.slow
def test_quantised_shards_over_two_processes(tiny: Path) -> None:
    """The same integers and scales as in one process. Inputs that the processes split are read by both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    form = ["--quantize", "int8", "--dtype", "float32"]
    several = [*form, "--mesh", "1,4,1", "--devices", "2", "--processes", "2", "--port", port]
    processes = [start(tiny, [*several, "--process", str(number)]) for number in range(2)]
    found = [result(process) for process in processes]
    alone = load(tiny, *form, "--mesh", "1,1,1", "--devices", "1")
    for name, value in alone["sums"].items():
        is_split = name == "['embed']" or any(name == f"['layers']['{matrix}']" for matrix in MATRICES)
        total = sum(one["sums"][name] for one in found) / (1 if is_split else 2)
        assert math.isclose(total, value, rel_tol=1e-9, abs_tol=1e-7), name
    embed = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"].nbytes
    assert [one["bytes_read"] for one in found] == [alone["bytes_read"] - embed // 2] * 2
