"""Index of all tensors of a model folder by name, and reading of slices directly into given arrays.

Reads use ``pread`` instead of a memory map, because mapped pages count as resident memory and peak memory during
loading must be bounded. Only the bytes of the slice are read.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.locate import ADAPTER
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES, READ_DTYPES, TensorInfo, read_tensors
from prb_jax.records.reading import read_object
from prb_jax.seams import BUILTIN, get

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
# Files beside models that are not weights.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt")
# Prefixes of Gemma 3 and Qwen 3.5.
_BESIDE_TEXT = re.compile(
    r"(model\.)?multi_modal_projector\.|model\.language_model\.layers\.\d+\.linear_attn\."
)
SCALE = "_scale_inv"  # suffix of an FP8 matrix's name
QUANT_STATE = ".quant_state.bitsandbytes__"  # between the name of a four-bit matrix and its kind
_AS_STORED = re.compile(
    rf"(_orig_mod|module|model\.model)\.|.*(\.modules_to_save\.default\.|{SCALE}$|{re.escape(QUANT_STATE)})"
)
# Rows are read and converted in blocks of at most this size, to limit scratch memory.
_BLOCK_BYTES = 2 << 20
# Rows transposed at once: their target stays in the core's cache until it is complete.
_STRIP_ROWS = 16


class Update(Protocol):
    """Function that computes slices of a tensor whose values differ from its file."""

    def __call__(
        self, reader: SliceReader, out: np.ndarray, tensor: TensorInfo, region: tuple[slice, ...]
    ) -> None:
        """Fill `out`; see :meth:`SliceReader.read`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExpertFactors:
    """Low-rank updates of all experts in one tensor: W_e + scale * B_e A_e for each expert e of E."""

    a: TensorInfo  # [E * r, I], expert by expert
    b: TensorInfo  # [O, r * E]: column n * E + e is column n of expert e
    rank: int  # r
    scale: float


@dataclass(frozen=True)
class WeightIndex:
    """All tensors of a model folder."""

    folder: Path
    files: tuple[Path, ...]  # weight files, sorted by name
    tensors: Mapping[str, TensorInfo]  # every tensor by name
    # functions for tensors whose values differ from the files
    updates: Mapping[str, Update] = field(default_factory=dict)
    told: tuple[str, ...] = ()  # notes on tensors that are converted during reading
    # adapters of experts by the name of the tensor of all experts in transformers; applied by the reader of experts
    expert_factors: Mapping[str, ExpertFactors] = field(default_factory=dict)


def index_folder(folder: str | Path, *, side_files: Sequence[tuple[str, str]] = ()) -> WeightIndex:
    """Find and check the weight files of a folder: one file, or several with an index.

    Safetensors are preferred; files of ``torch.save`` are read without running code from them
    (:mod:`prb_jax.models.checkpoints.weight_file`).

    Args:
      side_files: Further files, each with a prefix for its names; files that do not exist are skipped.

    Raises:
      CheckpointError: The folder or its weights are missing (with a remedy for other pickle files or an adapter), a
        file is broken, the index names a missing file or the wrong file of a tensor, or two files contain the
        same tensor.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: expected a model folder, found {'a file' if folder.exists() else 'nothing'}"
        )
    if (folder / ADAPTER).is_dir():
        return get("models", "adapted weights").value(folder, side_files)
    index = _index_weights(folder, [name for name, _ in side_files])
    files, tensors = list(index.files), dict(index.tensors)
    for name, prefix in side_files:
        path = folder / name
        if path.exists() and path not in files:
            files.append(path)
            _add_tensors(tensors, path, prefix)
    found = WeightIndex(folder, tuple(files), tensors)
    if any(map(_AS_STORED.match, tensors)):
        found = get("models", "as stored").value(found)
    if any(map(_BESIDE_TEXT.match, found.tensors)):
        found = get("models", "text tensors").value(found)
    return found


def _index_weights(folder: Path, side_files: Sequence[str]) -> WeightIndex:
    for single_file, index_file in ((SINGLE_FILE, INDEX_FILE), (TORCH_FILE, TORCH_INDEX_FILE)):
        single, index = folder / single_file, folder / index_file
        if single.exists() and index.exists():
            raise CheckpointError(
                f"{folder}: holds both {single_file} and {index_file}: remove the stale one"
            )
        if single.exists():
            return WeightIndex(folder, (single,), read_tensors(single))
        if index.exists():
            return _index_shards(folder, index)
    others = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in BUILTIN["weights"] and path.name not in (*_NOT_WEIGHTS, *side_files)
    ]
    if len(others) == 1 and "adapter" not in others[0].name:
        return WeightIndex(folder, (others[0],), read_tensors(others[0]))
    raise get("weights explained", "none").value(folder)


def _add_tensors(tensors: dict[str, TensorInfo], path: Path, prefix: str = "") -> None:
    """Add the tensors of one more file, with ``prefix`` before their names."""
    for tensor in read_tensors(path).values():
        name = prefix + tensor.name
        if name in tensors:
            raise CheckpointError(f"{path}: tensor '{name}' is also in {tensors[name].path.name}")
        tensors[name] = replace(tensor, name=name)


def _index_shards(folder: Path, index: Path) -> WeightIndex:
    weight_map = read_object(index, error=CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: field 'weight_map': expected an object from tensor to file")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index}: tensor '{name}': expected a file name in the folder, found {quote(file_name)}"
            )
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    tensors: dict[str, TensorInfo] = {}
    for path in files:
        if not os.path.exists(path):  # also false for names that are invalid for files
            raise CheckpointError(f"{index}: names the file '{path.name}', which is not in the folder")
        _add_tensors(tensors, path)
    for name, file_name in weight_map.items():
        holder = tensors[name].path.name if name in tensors else None
        if holder != file_name:
            but = "no file holds it" if holder is None else f"it is in '{holder}'"
            raise CheckpointError(f"{index}: tensor '{name}' should be in '{file_name}', but {but}")
    return WeightIndex(folder, files, tensors)


class SliceReader:
    """Thread-safe reader of tensor slices of an index; counts bytes."""

    def __init__(self, index: WeightIndex) -> None:
        self._index = index
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def read_into(self, out: np.ndarray, name: str, region: tuple[slice, ...]) -> None:
        """Fill ``out`` with a region of the tensor of this name; see :meth:`read`."""
        self.read(out, self._index.tensors[name], region, self._index.updates.get(name))

    def read(
        self, out: np.ndarray, tensor: TensorInfo, region: tuple[slice, ...], update: Update | None = None
    ) -> None:
        """Fill ``out`` with a region of a tensor, converted to ``out``'s dtype.

        Args:
          out: Array with the region's shape and any strides, e.g. a transposed view; one or two axes, or three with a
            middle axis of size 1 (taps of convolutions).
          tensor: Tensor to read.
          region: One slice with step 1 for each axis of the tensor.
          update: Function that computes the values, if they differ from the file.

        Raises:
          CheckpointError: The tensor's values are not floating-point numbers, or the file became shorter.
        """
        if update is not None:
            update(self, out, tensor, region)
            return
        if tensor.dtype not in READ_DTYPES:
            raise CheckpointError(
                f"{tensor.path}: tensor '{tensor.name}': expected floating-point weights, found {tensor.dtype} "
                "(quantised weights are not supported)"
            )
        dtype = READ_DTYPES[tensor.dtype]
        bounds = [part.indices(size) for part, size in zip(region, tensor.shape, strict=True)]
        if len(bounds) == 3 and tensor.shape[1] == 1:
            bounds, out = [bounds[0], bounds[2]], out[:, 0]
        if len(bounds) == 1:
            bounds, out = [(0, 1, 1), *bounds], out[None]
        (first_row, last_row, _), (first, last, _) = bounds
        if out.size == 0:
            return
        row_bytes, width = tensor.shape[-1] * dtype.itemsize, (last - first) * dtype.itemsize
        rows_a_block = max(1, _BLOCK_BYTES // width)
        descriptor = self._descriptor(tensor.path)
        for row in range(first_row, last_row, rows_a_block):
            rows = min(rows_a_block, last_row - row)
            target = out[row - first_row : row - first_row + rows]
            direct = target.dtype == dtype and target.flags.c_contiguous
            block = target if direct else np.empty((rows, last - first), dtype)
            data = block.reshape(-1).view(np.uint8)
            start = tensor.start + row * row_bytes + first * dtype.itemsize
            # Whole rows are contiguous.
            runs = 1 if width == row_bytes else rows
            for number, part in enumerate(data.reshape(runs, -1)):
                self._read(descriptor, part, start + number * row_bytes, tensor)
            if not direct:
                _copy(target, block)

    def _read(self, descriptor: int, data: np.ndarray, start: int, tensor: TensorInfo) -> None:
        done = 0
        while done < data.size:
            count = os.preadv(descriptor, [data.data[done:]], start + done)
            if count == 0:
                raise CheckpointError(f"{tensor.path}: became shorter while tensor '{tensor.name}' was read")
            done += count
        with self._lock:
            self.bytes_read += done

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                try:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
            return self._descriptors[path]


def _copy(target: np.ndarray, block: np.ndarray) -> None:
    """Assign ``target[...] = block``, fast for transposed targets, and without Python's lock for bfloat16."""
    strip = len(block)
    if abs(target.strides[0]) < abs(target.strides[1]):
        strip = _STRIP_ROWS
    widened = block.dtype == FLOAT_DTYPES["BF16"] and target.dtype == np.float32
    if widened or block.dtype == target.dtype:
        # Convert as integers: a bfloat16 is the upper half of the equal float32.
        target = target.view(f"u{target.dtype.itemsize}")
        block = block.view(f"u{block.dtype.itemsize}")
    for row in range(0, len(block), strip):
        rows = block[row : row + strip]
        if widened:
            rows = np.left_shift(rows, 16, dtype=np.uint32)
        elif rows.dtype != target.dtype:
            rows = rows.astype(target.dtype)
        target[row : row + strip] = rows
