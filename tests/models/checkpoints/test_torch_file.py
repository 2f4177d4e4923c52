"""Files of torch.save, read without torch: every value against torch's own, and refusals."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.checkpoints.torch_file import read_torch_file
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES
from prb_jax.models.checkpoints.weight_index import SliceReader, index_folder
from prb_jax.models.config.decoder import load_config
from tests.tiny_models import write_tiny_model


def save(state: Any, path: Path, **options: Any) -> Path:
    import torch

    torch.save(state, path, **options)
    return path


def test_values_are_those_of_torch(tmp_path: Path) -> None:
    import torch

    rows = torch.randn(6, 4)
    state = {
        "float": torch.randn(3, 5),
        "half": torch.randn(2, 3).half(),
        "bfloat": torch.randn(4).bfloat16(),
        "double": torch.randn(2, 2).double(),
        "part": rows[2:5],  # a view into a larger storage
        "shared": rows,
        "parameter": torch.nn.Parameter(torch.randn(2, 7)),
    }
    save(state, tmp_path / "pytorch_model.bin")
    index = index_folder(tmp_path)
    with SliceReader(index) as reader:
        for name, value in state.items():
            info = index.tensors[name]
            assert info.shape == tuple(value.shape)
            values = np.empty(info.shape, FLOAT_DTYPES[info.dtype])
            reader.read_into(values, name, tuple(slice(0, size) for size in info.shape))
            np.testing.assert_array_equal(values.astype(np.float64), value.detach().double().numpy())


def test_a_module_and_its_counters(tmp_path: Path) -> None:
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = module.state_dict()
    tensors = read_torch_file(save(state, tmp_path / "x.pt"))
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert {name: info.shape for name, info in tensors.items()} == shapes
    assert tensors["1.num_batches_tracked"].dtype == "I64"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_checkpoint_of_torch_is_that_of_safetensors(shards: int, tmp_path: Path) -> None:
    import json

    import jax
    from safetensors.torch import load_file

    folder = write_tiny_model(tmp_path, "llama")
    config = load_config(folder)
    expected, _ = load_params(folder, config)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{n}.bin" for n in range(shards)]
    weight_map = {name: files[number % shards] for number, name in enumerate(sorted(state))}
    for file in files:
        save({name: value for name, value in state.items() if weight_map[name] == file}, folder / file)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    params, report = load_params(folder, config)
    assert report.files == tuple(files)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("written_by_the_pickle",)


def test_code_in_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    save({"a": torch.ones(2), "b": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"asks for 'posix\.mkdir', which .* is not run"):
        index_folder(tmp_path)
    assert not (tmp_path / "written_by_the_pickle").exists()


def test_refusals(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "x.pt"

    def refused(state: Any, message: str, **options: Any) -> None:
        save(state, path, **options)
        with pytest.raises(CheckpointError, match=message) as caught:
            read_torch_file(path)
        assert str(path) in str(caught.value)

    refused({"a": torch.ones(3, 2).T}, "'a' is not stored row by row; convert it")
    refused([torch.ones(3)], "expected a state dict, found list")
    refused({"model": {"a": torch.ones(3)}}, "entry 'model': expected a tensor, found dict")
    refused({"a": torch.ones(3)}, "before torch 1.6", _use_new_zipfile_serialization=False)
    path.write_bytes(save({"a": torch.ones(300)}, path).read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="truncated"):
        read_torch_file(path)


def test_a_tensor_beyond_its_storage(tmp_path: Path) -> None:
    import torch

    whole, path = save({"a": torch.ones(8)}, tmp_path / "whole.pt"), tmp_path / "cut.pt"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[:16] if "/data/" in name else data)
    with pytest.raises(CheckpointError, match="'a' reaches beyond its storage of 16 bytes"):
        read_torch_file(path)
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("x/data.pkl", pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="entry 'a': expected a tensor, found int"):
        read_torch_file(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"}r\xff\xff\xff\xff.", "it has an entry 4294967295 of its memo in 7 bytes"),  # 32 GB of memory
        (b"\x8e" + (1 << 62).to_bytes(8, "little") + b".", "expected 4611686018427387904 bytes"),
        (b"\x96" + (1 << 61).to_bytes(8, "little"), "expected 2305843009213693952 bytes"),
        (b"", "pickle exhausted"),
        (b".", "unpickling stack underflow"),
        (
            b"}(X\1\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
            b"X\1\0\0\x000X\3\0\0\0cpuK\4tQK\0(J\xff\xff\xff\xffK\4t(K\1K\1ttRu.",
            r"a tensor of shape \(-1, 4\) with the strides \(1, 1\)",
        ),
    ],
)
def test_a_hostile_pickle_takes_no_memory_and_is_one_line_with_a_reason(tmp_path, data, reason) -> None:
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("x/data.pkl", data)
    with pytest.raises(CheckpointError, match=f"{path}: data.pkl is not a state dict: {reason}"):
        read_torch_file(path)
