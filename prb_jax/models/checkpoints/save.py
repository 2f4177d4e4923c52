"""Saving of a parameter tree to a Hugging Face folder: the bitwise inverse of loading."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.hf_map import LeafMap, file_tensors, flatten, leaf_maps
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES
from prb_jax.models.checkpoints.weight_index import INDEX_FILE, SINGLE_FILE
from prb_jax.models.config.decoder import STANDARD, DecoderConfig, parse_config
from prb_jax.models.config.family import known_families
from prb_jax.models.head import EMBEDDING_KEY, LINEAR
from prb_jax.records.writing import whole_file

_DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_params(
    params: Mapping[str, Any],
    config: DecoderConfig,
    folder: str | Path,
    *,
    raw_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a ``*ForSequenceClassification`` checkpoint that transformers and :func:`load_params` read. If ``config``
    has a linear head of another name, write the head with the body of a language model.

    Each file is written under a temporary name and renamed; ``config.json`` comes last. Host memory
    contains the leaves of one tensor at a time. The caller writes tokenizer files.

    Args:
      params: Nested dict of arrays with the shapes of ``abstract_params(config)``; dtypes are kept.
      config: Configuration of the model.
      folder: Folder, created if necessary; must not contain weights yet.
      raw_config: Contents of ``config.json``, by default ``config.original``. ``architectures`` and the dtype
        are updated.
      max_shard_bytes: Maximum size of a weight file; larger models get several files with an index.

    Returns:
      Path of the folder.

    Raises:
      CheckpointError: The parameters do not match ``config``, ``raw_config`` describes another model, an array spans
        several processes, the folder already contains weights, or a write fails.
    """
    folder = Path(folder)
    leaves = leaf_maps(config)
    arrays = _checked_arrays(params, leaves)
    embedding = next(leaf.path for leaf in leaves if leaf.key == EMBEDDING_KEY)
    raw = _updated_config(config, raw_config, dtype=arrays[embedding].dtype)
    tensors = {
        key: _Tensor(key, shape, np.dtype(arrays[leaf.path].dtype))
        for leaf in leaves
        for key, shape in leaf.written.items()
    }
    values = file_tensors(arrays, config)
    shards = _split([*tensors.values()], max_shard_bytes=max_shard_bytes)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if present := sorted(path.name for path in folder.glob("model*.safetensors*")):
            raise CheckpointError(
                f"{folder}: already contains weights ({', '.join(present[:3])}): choose another folder"
            )
        for name, shard in zip(names, shards, strict=True):
            with whole_file(folder / name) as file:
                _write_tensors(file, shard, values)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
                "weight_map": {t.key: name for name, shard in zip(names, shards) for t in shard},
            }
            _write_json(folder / INDEX_FILE, index)
        _write_json(folder / "config.json", raw)
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(f"{where}: cannot be written: {error.strerror or error}") from error
    return folder


def _checked_arrays(params: Mapping[str, Any], leaves: Sequence[LeafMap]) -> dict[tuple[str, ...], Any]:
    arrays = flatten(params)
    expected = {leaf.path: leaf.shape for leaf in leaves}
    if arrays.keys() != expected.keys():
        names = sorted("/".join(path) for path in arrays.keys() ^ expected.keys())
        raise CheckpointError(
            f"the parameters are not those of the configuration: they differ in {', '.join(names)}"
        )
    for path, array in arrays.items():
        name = "/".join(path)
        if array.shape != expected[path]:
            raise CheckpointError(
                f"parameter '{name}': expected shape {list(expected[path])}, found {list(array.shape)}"
            )
        if np.dtype(array.dtype) not in _DTYPE_NAMES:
            raise CheckpointError(
                f"parameter '{name}': expected one of {list(_DTYPE_NAMES.values())}, found {array.dtype}"
            )
        if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
            raise CheckpointError(f"parameter '{name}' spans several processes: gather it before saving")
    return arrays


def _updated_config(
    config: DecoderConfig, raw_config: Mapping[str, Any] | None, *, dtype: Any
) -> dict[str, Any]:
    raw = dict(config.original if raw_config is None else raw_config)
    raw["architectures"] = [known_families()[config.model_type].architecture]
    raw.pop("quantization_config", None)  # the matrices are already multiplied by their scales
    raw["dtype" if "dtype" in raw else "torch_dtype"] = np.dtype(dtype).name
    described = parse_config(raw, where="raw_config")
    same = {"architectures": (), "torch_dtype": None, "ignored_keys": (), "head": LINEAR, "layout": STANDARD}
    if replace(described, **same) != replace(config, **same):
        raise CheckpointError(
            "raw_config describes another model than config: pass the one that config was parsed from"
        )
    if config.head != LINEAR:  # transformers has only the class of the language model for it
        raw["architectures"] = [known_families()[config.model_type].language_model]
        for name in ("num_labels", "id2label", "label2id"):
            raw.pop(name, None)
    return raw


def _split(tensors: Sequence[_Tensor], *, max_shard_bytes: int) -> list[list[_Tensor]]:
    """Split consecutive tensors into files of at most the given size; a larger tensor gets a separate file."""
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _write_tensors(
    file: BinaryIO, tensors: Sequence[_Tensor], values: Iterator[tuple[str, np.ndarray]]
) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        entries[tensor.key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the data starts at a multiple of eight bytes
    file.write(len(header).to_bytes(8, "little") + header)

    for tensor, (key, value) in zip(tensors, values):
        assert tensor.key == key
        file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
