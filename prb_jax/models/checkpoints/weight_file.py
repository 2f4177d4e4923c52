"""Locations of the tensors in one weight file, without reading them.

The safetensors format (https://github.com/huggingface/safetensors) consists of eight bytes with the header's length as
a little-endian integer; a JSON object from tensor name to dtype, shape and byte range, with an optional
``__metadata__``; and the bytes of all tensors, without gaps.

Other file types are found by suffix, as `weights` in :mod:`prb_jax.seams`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from prb_jax.errors import CheckpointError, quote
from prb_jax.records.files import open_file
from prb_jax.records.reading import parse_json
from prb_jax.seams import BUILTIN, get

#: dtypes whose values are read; for others only the size is known.
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
FLOAT_DTYPES: dict[str, np.dtype] = {name: np.dtype(kind) for name, kind in _FLOATS.items()}
#: Includes dtypes that require a separate scale.
READ_DTYPES = FLOAT_DTYPES | {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}
ITEM_SIZES = {name: dtype.itemsize for name, dtype in FLOAT_DTYPES.items()} | {
    **dict.fromkeys(("I64", "U64", "C64"), 8),
    **dict.fromkeys(("I32", "U32"), 4),
    **dict.fromkeys(("I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
MOST_AXES = 16
_LENGTH_BYTES = 8
# Limit of the reference implementation: a file with a longer header is not a safetensors file.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Location of one tensor: ``start`` is a byte offset from the beginning of ``path``."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a weight file by name; for errors see :func:`read_header`."""
    return get("weights", path.suffix).value(path) if path.suffix in BUILTIN["weights"] else read_header(path)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a safetensors file by name.

    Raises:
      CheckpointError: The file cannot be read, is truncated or too long, its header violates the format, or byte
        ranges leave gaps, overlap, or do not fit shape and dtype.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES:
                raise CheckpointError(f"{path}: truncated: {size} bytes, too short for a safetensors file")
            if not 0 < length <= _MAX_HEADER_BYTES:
                pointer = length == int.from_bytes(b"version ", "little")
                hint = "; it is a pointer of Git LFS: run `git lfs pull`" if pointer else ""
                raise CheckpointError(f"{path}: not a safetensors file: its header has {length} bytes{hint}")
            if _LENGTH_BYTES + length > size:
                raise CheckpointError(
                    f"{path}: truncated: the header alone needs {_LENGTH_BYTES + length} bytes, "
                    f"the file has {size}"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    entries = parse_json(text, where=f"{path}: the safetensors header", error=CheckpointError)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    entries.pop("__metadata__", None)
    first = _LENGTH_BYTES + length
    tensors = {
        name: _described_tensor(name, entry, path=path, first=first) for name, entry in entries.items()
    }
    _check_ranges(tensors, path=path, first=first, size=size)
    return tensors


def _described_tensor(name: str, entry: Any, *, path: Path, first: int) -> TensorInfo:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor '{name}': {what}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong(f"expected dtype, shape and data_offsets in the header, found {quote(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise wrong(f"unknown dtype {quote(dtype)}")
    if not _are_counts(shape):
        raise wrong(f"expected a list of sizes as shape, found {quote(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise wrong(f"expected two byte offsets as data_offsets, found {quote(offsets)}")
    nbytes = math.prod(shape) * ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise wrong(f"{dtype} of shape {shape} needs {nbytes} bytes, but data_offsets are {offsets}")
    return TensorInfo(
        name=name, path=path, dtype=dtype, shape=tuple(shape), start=first + offsets[0], nbytes=nbytes
    )


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > MOST_AXES:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_ranges(tensors: dict[str, TensorInfo], *, path: Path, first: int, size: int) -> None:
    end = first
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor '{tensor.name}': its byte range starts at {tensor.start}, "
                f"which {what} (ends at {end})"
            )
        end += tensor.nbytes
    if size < end:
        raise CheckpointError(f"{path}: truncated: the header promises {end} bytes, the file has {size}")
    if size > end:
        raise CheckpointError(
            f"{path}: {size - end} bytes follow the last tensor: expected {end} bytes, found {size}"
        )
