"""Locations of the tensors in a file of ``torch.save``, without reading them.

Since torch 1.6 a file of ``torch.save`` is a zip archive. It contains ``data.pkl``, a pickle that describes the
tensors, and one uncompressed member with the bytes of each storage. A pickle is a program. The unpickler here accepts
only the few names in state dicts and refuses all others, so a pickle can only create dicts and descriptions of
tensors. Torch is not required.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from prb_jax.errors import CheckpointError, first_line, quote
from prb_jax.models.checkpoints.weight_file import ITEM_SIZES, MOST_AXES, TensorInfo
from prb_jax.records.files import open_file

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
# The pickles of even the largest models are far smaller.
_MAX_PICKLE_BYTES = 16 << 20


class _Storage(NamedTuple):
    dtype: str
    member: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a state dict that ``torch.save`` wrote, by name.

    Raises:
      CheckpointError: The file cannot be read or is older than torch 1.6, the pickle contains anything except the
        parts of a state dict, or a tensor is not stored row by row.
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
    except Exception as error:  # a broken or hostile pickle can raise anything
        raise CheckpointError(f"{path}: data.pkl is not a state dict: {first_line(error)}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: expected a state dict, found {type(state).__name__}")
    with open_file(path) as file:
        return {
            str(name): _located(str(name), value, path=path, root=root, members=members, file=file)
            for name, value in state.items()
        }


def _member(archive: zipfile.ZipFile, name: str, path: Path, *, most: int) -> bytes:
    """Return the bytes of a member; its real size may exceed the size in the archive."""
    with archive.open(name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{path}: {name} is too large for a state dict")
    return data


def _check_sizes(data: bytes) -> None:
    """Raise ValueError for a pickle with a number that would allocate unbounded memory."""
    for operation, value, _ in pickletools.genops(data):  # genops refuses lengths beyond the end
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (value or 0) > len(data):
            raise ValueError(f"it has an entry {value} of its memo in {len(data)} bytes")


class _Unpickler(pickle.Unpickler):
    """Unpickler that provides only the parts of a state dict."""

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
            f"{self._path}: the pickle asks for '{module}.{name}', which is not part of a state dict, so it is not "
            f"run; if you trust it, {_REMEDY}"
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
    if len(sizes) != len(steps) or len(sizes) > MOST_AXES or min(sizes, default=0) < 0:
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
    item = ITEM_SIZES[value.storage.dtype]
    if info is None or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path}: tensor '{name}': its bytes are not in the file as they are")
    if value.offset < 0 or (value.offset + size) * item > info.file_size:
        raise CheckpointError(f"{path}: tensor '{name}' reaches beyond its storage of {info.file_size} bytes")
    # The local header contains the lengths of the name and of the padding before the data.
    file.seek(info.header_offset + _LENGTHS_AT)
    lengths = file.read(4)
    start = info.header_offset + _LOCAL_HEADER_BYTES + value.offset * item
    start += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    if start + size * item > os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{path}: truncated: tensor '{name}' reaches beyond the end of the file")
    return TensorInfo(
        name=name, path=path, dtype=value.storage.dtype, shape=value.shape, start=start, nbytes=size * item
    )
