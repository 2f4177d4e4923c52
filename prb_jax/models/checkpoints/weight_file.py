"""The tensors of one weight file, of safetensors or of ``torch.save``: where each lies, and nothing read of it.

The format of safetensors (https://github.com/huggingface/safetensors): eight bytes, the header's length as a
little-endian integer; a JSON object from tensor name to dtype, shape and byte range, with an optional
``__metadata__``; then the bytes of all tensors, without gaps.

Since torch 1.6 a file of ``torch.save`` is a zip archive: ``data.pkl``, a pickle that says what the tensors are, and
one uncompressed member with the bytes of each storage. A pickle is a program; here it is run by an unpickler that knows
the handful of names state dicts are made of and refuses every other, so that nothing but dicts and descriptions of
tensors can come of it. No torch is needed.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from prb_jax.errors import CheckpointError, first_line, quote
from prb_jax.records.reading import open_file, parse_json

TORCH_SUFFIXES = (".bin", ".pt", ".pth")

#: dtypes whose values are read; the others are only measured.
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
FLOAT_DTYPES: dict[str, np.dtype] = {name: np.dtype(kind) for name, kind in _FLOATS.items()}
_ITEM_SIZES = {name: dtype.itemsize for name, dtype in FLOAT_DTYPES.items()} | {
    **dict.fromkeys(("I64", "U64", "C64"), 8),
    **dict.fromkeys(("I32", "U32"), 4),
    **dict.fromkeys(("I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_MOST_AXES = 16
_LENGTH_BYTES = 8
# The limit of the reference implementation: a longer header means that this is not a safetensors file.
_MAX_HEADER_BYTES = 100_000_000

_REMEDY = (
    "convert it where you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
    '"model.safetensors", metadata={"format": "pt"})'
)

_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_LOCAL_HEADER_BYTES = 30
_LENGTHS_AT = 26
# A pickle with the names and shapes of even the largest model is far below this.
_MAX_PICKLE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies: ``start`` is a byte offset from the beginning of ``path``."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a weight file, by name; errors as of :func:`read_header` and :func:`read_torch_file`."""
    return read_torch_file(path) if path.suffix in TORCH_SUFFIXES else read_header(path)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file, by name.

    Raises:
      CheckpointError: the file cannot be read, is truncated or too long, its header is not what the
        format says, or byte ranges leave gaps, overlap, or do not fit shape and dtype.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES:
                raise CheckpointError(f"{path}: truncated: {size} bytes, too short for a safetensors file")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: not a safetensors file: it declares a header of {length} bytes"
                )
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
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise wrong(f"unknown dtype {quote(dtype)}")
    if not _are_counts(shape):
        raise wrong(f"expected a list of sizes as shape, found {quote(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise wrong(f"expected two byte offsets as data_offsets, found {quote(offsets)}")
    nbytes = math.prod(shape) * _ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise wrong(f"{dtype} of shape {shape} needs {nbytes} bytes, but data_offsets are {offsets}")
    return TensorInfo(
        name=name, path=path, dtype=dtype, shape=tuple(shape), start=first + offsets[0], nbytes=nbytes
    )


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > _MOST_AXES:
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


class _Storage(NamedTuple):
    dtype: str
    member: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a state dict that ``torch.save`` wrote, by name.

    Raises:
      CheckpointError: a file that cannot be read, one of before torch 1.6, a pickle that names anything but
        the parts of a state dict, or a tensor that is not stored row by row.
    """
    try:
        with open_file(path) as raw, zipfile.ZipFile(raw) as archive:
            pickles = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == "data.pkl"]
            if len(pickles) != 1:
                raise CheckpointError(f"{path}: not a file of torch.save: it holds {len(pickles)} data.pkl")
            root = pickles[0].removesuffix("data.pkl")
            order = f"{root}byteorder"
            if order in archive.namelist() and _member(archive, order, path, most=16) != b"little":
                raise CheckpointError(f"{path}: was written on a big-endian machine; {_REMEDY}")
            data = _member(archive, pickles[0], path, most=_MAX_PICKLE_BYTES)
            _check_sizes(data)
            state = _Unpickler(io.BytesIO(data), path).load()
            members = {info.filename: info for info in archive.infolist()}
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path}: truncated, or a pickle from before torch 1.6, which cannot be read without running it; {_REMEDY}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:  # what a broken or hostile pickle can raise has no bound
        raise CheckpointError(f"{path}: data.pkl is not that of a state dict: {first_line(error)}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: expected a state dict, found {type(state).__name__}")
    with open_file(path) as file:
        return {
            str(name): _located(str(name), value, path=path, root=root, members=members, file=file)
            for name, value in state.items()
        }


def _member(archive: zipfile.ZipFile, name: str, path: Path, *, most: int) -> bytes:
    """The bytes of a member, whose size the archive may state wrongly and compression hide."""
    with archive.open(name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{path}: {name} is too large to be that of a state dict")
    return data


def _check_sizes(data: bytes) -> None:
    """Raise ValueError for a pickle with a number on which memory of any size would be taken."""
    for operation, value, _ in pickletools.genops(data):  # it refuses lengths beyond the end itself
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (value or 0) > len(data):
            raise ValueError(f"it has an entry {value} of its memo in {len(data)} bytes")


class _Unpickler(pickle.Unpickler):
    """Runs a pickle with nothing at its disposal but the parts of a state dict."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file, encoding="utf-8")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        parts = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            **{("torch", storage): dtype for storage, dtype in _STORAGES.items()},
        }
        if (module, name) in parts:
            return parts[module, name]
        raise CheckpointError(
            f"{self._path}: the pickle asks for '{module}.{name}', which is no part of a state dict and is not run; "
            f"if you trust it, {_REMEDY}"
        )

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, member, *_ = pid
        if kind != "storage" or dtype not in _STORAGES.values():
            raise CheckpointError(
                f"{self._path}: data.pkl refers to something that is not a storage: {quote(pid)}"
            )
        return _Storage(dtype, str(member))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    sizes, steps = tuple(map(int, shape)), tuple(map(int, strides))
    if len(sizes) != len(steps) or len(sizes) > _MOST_AXES or min(sizes, default=0) < 0:
        raise ValueError(f"a tensor of shape {quote(sizes)} with the strides {quote(steps)}")
    return _Tensor(storage, int(offset), sizes, steps)


def _located(
    name: str, value: Any, *, path: Path, root: str, members: Mapping[str, zipfile.ZipInfo], file: IO[bytes]
) -> TensorInfo:
    if not isinstance(value, _Tensor):
        raise CheckpointError(
            f"{path}: entry '{name}': expected a tensor, found {type(value).__name__}; a training checkpoint holds "
            f"the state dict in one of its entries: {_REMEDY}"
        )
    size, in_rows = 1, True
    for length, stride in zip(reversed(value.shape), reversed(value.strides), strict=True):
        in_rows &= length == 1 or stride == size
        size *= length
    if size and not in_rows:
        raise CheckpointError(f"{path}: tensor '{name}' is not stored row by row; {_REMEDY}")
    info = members.get(f"{root}data/{value.storage.member}")
    item = _ITEM_SIZES[value.storage.dtype]
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path}: tensor '{name}': its bytes are not in the file as they are")
    if value.offset < 0 or (value.offset + size) * item > info.file_size:
        raise CheckpointError(f"{path}: tensor '{name}' reaches beyond its storage of {info.file_size} bytes")
    # The name and the padding before the data are as long as the local header says.
    file.seek(info.header_offset + _LENGTHS_AT)
    lengths = file.read(4)
    start = info.header_offset + _LOCAL_HEADER_BYTES + value.offset * item
    start += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    if start + size * item > os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{path}: truncated: tensor '{name}' reaches beyond the end of the file")
    return TensorInfo(
        name=name, path=path, dtype=value.storage.dtype, shape=value.shape, start=start, nbytes=size * item
    )
