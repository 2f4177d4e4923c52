"""Headers and slices of safetensors files, whole and broken."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints import weight_index
from prb_jax.models.checkpoints.weight_file import read_header
from prb_jax.models.checkpoints.weight_index import SliceReader, index_folder


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(37, 11))
    return {
        "a.f32": values.astype(np.float32),
        "b.bf16": values.astype(ml_dtypes.bfloat16),
        "c.f16": values.astype(np.float16),
        "d.f64": values,
        "e.vector": rng.normal(size=23).astype(np.float32),
        "f.empty": np.zeros((0, 4), np.float32),
        "g.int": np.arange(6, dtype=np.int64).reshape(2, 3),
    }


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_header_of_a_mixed_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt", "note": "x"})
    header = read_header(path)
    assert set(header) == set(tensors())
    assert {info.dtype for info in header.values()} == {"F32", "BF16", "F16", "F64", "I64"}
    for name, value in tensors().items():
        assert header[name].shape == value.shape
        assert header[name].nbytes == value.nbytes


@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("name", ["a.f32", "b.bf16", "c.f16", "d.f64"])
def test_slices_equal_numpy_slices(
    name: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_index, "_BLOCK_BYTES", block_bytes)
    save_file(tensors(), tmp_path / "model.safetensors")
    whole = tensors()[name]
    regions = [
        (slice(0, 37), slice(0, 11)),
        (slice(5, 20), slice(0, 11)),
        (slice(None), slice(3, 7)),
        (slice(36, 37), slice(10, 11)),
        (slice(4, 4), slice(0, 11)),
    ]
    for region in regions:
        expected = whole[region]
        for dtype in (np.float32, ml_dtypes.bfloat16, whole.dtype):
            with SliceReader(index_folder(tmp_path)) as reader:
                straight = np.empty(expected.shape, dtype)
                reader.read_into(straight, name, region)
                transposed = np.empty(expected.shape[::-1], dtype)
                reader.read_into(transposed.T, name, region)
                # only the slice is read, once each time
                assert reader.bytes_read == 2 * expected.nbytes
            np.testing.assert_array_equal(straight, expected.astype(dtype))
            np.testing.assert_array_equal(transposed.T, expected.astype(dtype))


def test_vectors_and_integers(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with SliceReader(index_folder(tmp_path)) as reader:
        out = np.empty(4, np.float32)
        reader.read_into(out, "e.vector", (slice(7, 11),))
        np.testing.assert_array_equal(out, tensors()["e.vector"][7:11])
        assert reader.bytes_read == 16
        with pytest.raises(CheckpointError, match=r"'g\.int'.*found I64"):
            reader.read_into(np.empty((2, 3), np.float32), "g.int", (slice(None), slice(None)))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    index = index_folder(tmp_path)
    path.write_bytes(path.read_bytes()[:-2000])
    last = max(index.tensors.values(), key=lambda info: info.start)
    with (
        SliceReader(index) as reader,
        pytest.raises(CheckpointError, match=f"became shorter while tensor '{last.name}'"),
    ):
        reader.read_into(np.empty(last.shape, np.float64), last.name, (slice(None),) * len(last.shape))


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


TWICE = b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2)
BAD_HEADERS: list[tuple[Any, int, str]] = [
    (b"\x00\x93garbage", 0, "header: not valid JSON"),
    (b'{"a": ', 0, "header: not valid JSON"),
    ([], 0, "not a JSON object"),
    ({"a": 3}, 0, "'a': expected dtype, shape and data_offsets"),
    ({"a": entry(dtype="F31")}, 8, "'a': unknown dtype 'F31'"),
    ({"a": entry(shape=[-2])}, 8, "'a': expected a list of sizes"),
    ({"a": entry(data_offsets=[0])}, 8, "'a': expected two byte offsets"),
    ({"a": entry(shape=[3])}, 8, "'a': F32 of shape .3. needs 12 bytes"),
    ({"a": entry()}, 7, "truncated: the header promises"),
    ({"a": entry()}, 9, "1 bytes follow the last tensor"),
    ({"a": entry(), "b": entry(data_offsets=[4, 12])}, 12, "'b'.*overlaps"),
    ({"a": entry(), "b": entry(data_offsets=[12, 20])}, 20, "'b'.*gap"),
    (TWICE, 8, "field 'a' is given twice"),
]


@pytest.mark.parametrize(("header", "size", "message"), BAD_HEADERS)
def test_broken_headers(header: Any, size: int, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        index_folder(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1, None])
def test_truncated_files_and_other_ones(kept: int | None, tmp_path: Path) -> None:
    path, message = tmp_path / "model.safetensors", "truncated"
    save_file(tensors(), path)
    data = path.read_bytes()[:kept]
    if kept is None:
        data, message = b"version https://git-lfs.github.com/spec/v1\n", ".* pointer of Git LFS"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path}: {message}"):
        index_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", r"before torch 1\.6, which cannot be read without running it; .*save_file"),
        ("model.pt", r"before torch 1\.6"),
        ("weights.pkl", r"pickle files \(weights\.pkl\).*save_pretrained"),
    ],
)
def test_pickle_files_are_refused_with_the_remedy(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=message):
        index_folder(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found nothing"):
        index_folder(tmp_path / "absent")
    for name, message in (
        ("notes.txt", "found no weight file"),
        ("value_head.safetensors", r"found value_head\.safetensors"),
        ("adapter_model.safetensors", "adapter"),
    ):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match=message):
            index_folder(tmp_path)


ONE, TWO = "one.safetensors", "two.safetensors"


def write_shards(folder: Path, weight_map: Any) -> None:
    save_file({"a": np.ones(2, np.float32)}, folder / ONE)
    save_file({"b": np.ones(3, np.float32)}, folder / TWO)
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_indexed_and_ambiguous_files(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": ONE, "b": TWO})
    index = index_folder(tmp_path)
    assert [path.name for path in index.files] == [ONE, TWO]
    assert index.tensors["b"].path.name == TWO
    for name, message in ((TWO, r"'a' is also in one\.safetensors"), ("model.safetensors", "holds both")):
        save_file({"a": np.ones(2, np.float32)}, tmp_path / name)
        with pytest.raises(CheckpointError, match=message):
            index_folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": ONE, "b": "three.safetensors"}, r"'three\.safetensors', which is not in the folder"),
        ({"a": ONE, "c": TWO}, r"'c' should be in 'two\.safetensors', but no file"),
        ({"a": TWO, "b": ONE}, r"'a' should be in 'two\.safetensors', but it is in 'one"),
        ({"a": "../one.safetensors"}, "expected a file name in the folder"),
        ({}, "'weight_map': expected an object"),
        ("{", "not valid JSON"),
    ],
)
def test_broken_indexes(weight_map: Any, message: str, tmp_path: Path) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        index_folder(tmp_path)
