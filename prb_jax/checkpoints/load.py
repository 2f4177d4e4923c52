"""Weights from a Hugging Face folder straight into sharded arrays.

Each process reads only the bytes of its own shards. A shard is filled in place, by several threads, from
slices of the files, so peak host memory is the shards themselves plus a few megabytes on CPU, and one
shard elsewhere.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from prb_jax.checkpoints.hf_map import LeafMap, flatten, leaf_maps, nest
from prb_jax.checkpoints.matching import Match, check_tied_embeddings, match_tensors
from prb_jax.checkpoints.safetensors_reader import SliceReader, WeightIndex, index_folder
from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.config import DecoderConfig

# XLA's CPU client takes over a host buffer with this alignment instead of copying it.
_ALIGNMENT = 64
# Readers wait for the storage, so there may be more of them than cores.
_READERS = 8
# A large tensor is read by several of them.
_TASK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was read and what was not.

    Attributes:
      folder: the checkpoint.
      files: names of its weight files.
      used_keys: tensors that fill the parameters.
      ignored_keys: the other tensors, each with the reason why it is left aside.
      dtypes: how many of the used tensors are stored in each safetensors dtype.
      parameters: number of parameters of the whole model.
      bytes_read: bytes of weights that this process read.
      seconds: that it took until they were on the devices; 0 where nothing was read.
      head: name, shape and stored dtype of each tensor of the head, and its file where that is another one than
        the body's.
    """

    folder: str
    files: tuple[str, ...]
    used_keys: tuple[str, ...]
    ignored_keys: Mapping[str, str]
    dtypes: Mapping[str, int]
    parameters: int
    bytes_read: int
    seconds: float
    head: str


class LoadedParams(NamedTuple):
    """The parameter tree (nested dict of arrays) and how it was read."""

    params: dict[str, Any]
    report: LoadReport


def abstract_params(
    config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, head_dtype: DTypeLike | None = None
) -> dict[str, Any]:
    """Shapes and dtypes of the parameter tree, as ``jax.ShapeDtypeStruct``; nothing is allocated.

    Args:
      config: the model.
      dtype: of every leaf.
      head_dtype: of the score head, if it differs.
    """
    return nest(
        {
            leaf.path: jax.ShapeDtypeStruct(leaf.shape, _dtype_of(leaf, dtype, head_dtype))
            for leaf in leaf_maps(config)
        }
    )


def inspect_checkpoint(folder: str | Path, config: DecoderConfig) -> LoadReport:
    """Check every tensor's name, shape and dtype from the headers alone, without reading weights.

    Raises:
      CheckpointError: as :func:`load_params`.
    """
    index = index_folder(folder, side_files=config.layout.side_files)
    return _report(index, match_tensors(index, config))


def load_params(
    folder: str | Path,
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    shardings: Mapping[str, Any] | Sharding | None = None,
    head_dtype: DTypeLike | None = None,
    head: bool = True,
) -> LoadedParams:
    """Read a checkpoint into arrays with the given shardings.

    Args:
      folder: holds ``model.safetensors``, or several files and ``model.safetensors.index.json``.
      config: from ``config.json`` of the same folder.
      dtype: floating-point dtype of the arrays; each slice is converted as it is read.
      shardings: a tree like the parameters, or one sharding for all; None is the default device.
      head_dtype: dtype of the score head, if it differs.
      head: whether the head is read. Without it there is no "score" among the parameters (nor in
        `shardings`): it is for the caller to make a new one.

    Returns:
      Parameters (layers stacked on axis 0, matrices ``[in, out]``) and a report.

    Raises:
      CheckpointError: a missing, extra, misshapen or non-float tensor, a missing or re-initialised
        head, a broken or truncated file, pickle files; the message names the tensor or file.
      MeshError: a sharding that does not divide its array.
    """
    index = index_folder(folder, side_files=config.layout.side_files)
    match = match_tensors(index, config, head=head)
    chosen = _shardings_by_path(match.leaves, shardings)
    # The largest first: while its shard is handed over there is little else in memory.
    order = sorted(match.leaves, key=lambda leaf: -_local_size(leaf, chosen[leaf.path]))
    loaded: dict[tuple[str, ...], jax.Array] = {}
    begun = time.perf_counter()
    with SliceReader(index) as reader, ThreadPoolExecutor(_READERS, thread_name_prefix="read") as pool:
        check_tied_embeddings(index, config, reader=reader)
        for leaf in order:
            loaded[leaf.path] = _load_leaf(
                leaf, chosen[leaf.path], _dtype_of(leaf, dtype, head_dtype), reader=reader, pool=pool
            )
        seconds = time.perf_counter() - begun
        report = _report(index, match, bytes_read=reader.bytes_read, seconds=seconds)
    return LoadedParams(nest({leaf.path: loaded[leaf.path] for leaf in match.leaves}), report)


def _load_leaf(
    leaf: LeafMap, sharding: Sharding, dtype: np.dtype, *, reader: SliceReader, pool: ThreadPoolExecutor
) -> jax.Array:
    devices_by_part: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, part in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = [piece.indices(size)[:2] for piece, size in zip(part or (), leaf.shape)]
        devices_by_part.setdefault(tuple(bounds), []).append(device)
    shards = []
    for bounds, devices in devices_by_part.items():
        # Devices that hold the same part share one read.
        buffer = _aligned_empty(tuple(stop - start for start, stop in bounds), dtype)
        _fill(buffer, leaf, tuple(slice(*bound) for bound in bounds), reader=reader, pool=pool)
        shards += jax.block_until_ready([jax.device_put(buffer, device) for device in devices])
        # Where the device has its own memory the host buffer is free from here on.
        del buffer
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _fill(
    buffer: np.ndarray,
    leaf: LeafMap,
    part: tuple[slice, ...],
    *,
    reader: SliceReader,
    pool: ThreadPoolExecutor,
) -> None:
    """Read one shard: the given part of a leaf, from as many tensors as it has layers, many at a time."""
    jobs = [pool.submit(reader.read_into, *task) for task in _tasks(buffer, leaf, part)]
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:
            job.cancel()


Task = tuple[np.ndarray, str, tuple[slice, ...]]


def _tasks(buffer: np.ndarray, leaf: LeafMap, part: tuple[slice, ...]) -> Iterator[Task]:
    """What is read into where: (part of the buffer, tensor, its region)."""
    if not leaf.stacked:
        yield from _tasks_of_one(leaf.key, buffer, part, leaf)
        return
    for number, key in enumerate(leaf.file_keys[part[0]]):
        yield from _tasks_of_one(key, buffer[number], part[1:], leaf)


def _tasks_of_one(key: str, target: np.ndarray, region: tuple[slice, ...], leaf: LeafMap) -> Iterator[Task]:
    """One tensor's, in the file's orientation."""
    if leaf.transposed:
        target, region = target.T, region[::-1]
    first, last, done = region[0].start, region[0].stop, 0
    for start, stop in leaf.pieces or ((0, last),):  # each is rows done .. done + (stop - start) of the leaf
        low, high = max(first, done), min(last, done + stop - start)
        size = max(1, _TASK_BYTES // max(1, target[:1].nbytes))
        for row in range(low, high, size):
            end = min(high, row + size)
            rows = slice(start + row - done, start + end - done)
            yield target[row - first : end - first], key, (rows, *region[1:])
        done += stop - start


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _dtype_of(leaf: LeafMap, dtype: DTypeLike, head_dtype: DTypeLike | None) -> np.dtype:
    chosen = jnp.dtype(head_dtype if head_dtype is not None and leaf.is_head else dtype)
    if not jnp.issubdtype(chosen, jnp.floating):
        raise CheckpointError(f"weights cannot be loaded as {chosen}: expected a floating-point dtype")
    return chosen


def _shardings_by_path(
    leaves: tuple[LeafMap, ...], shardings: Mapping[str, Any] | Sharding | None
) -> dict[tuple[str, ...], Sharding]:
    if shardings is None:
        shardings = SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(shardings, Sharding):
        chosen = {leaf.path: shardings for leaf in leaves}
    else:
        chosen = flatten(shardings)
        paths = {leaf.path for leaf in leaves}
        if chosen.keys() != paths:
            names = sorted("/".join(path) for path in chosen.keys() ^ paths)
            raise MeshError(
                f"shardings and parameters are not the same tree: they differ in {', '.join(names)}"
            )
    for leaf in leaves:
        try:
            chosen[leaf.path].shard_shape(leaf.shape)
        except ValueError as error:
            raise MeshError(
                f"parameter '{leaf.name}' of shape {list(leaf.shape)} cannot be sharded as "
                f"{chosen[leaf.path]}: {error}"
            ) from error
    return chosen


def _local_size(leaf: LeafMap, sharding: Sharding) -> int:
    parts = {str(part) for part in sharding.addressable_devices_indices_map(leaf.shape).values()}
    return int(np.prod(sharding.shard_shape(leaf.shape), dtype=np.int64)) * len(parts)


def _report(index: WeightIndex, match: Match, *, bytes_read: int = 0, seconds: float = 0.0) -> LoadReport:
    body = {index.tensors[key].path for leaf in match.leaves if not leaf.is_head for key in leaf.file_keys}
    heads = []
    for tensor in (index.tensors[leaf.key] for leaf in match.leaves if leaf.is_head):
        place = "" if tensor.path in body else f" in {tensor.path.name}"
        heads.append(f"{tensor.name} {list(tensor.shape)} {tensor.dtype}{place}")
    return LoadReport(
        folder=str(index.folder),
        files=tuple(path.name for path in index.files),
        used_keys=match.used,
        ignored_keys=dict(match.ignored),
        dtypes=dict(Counter(index.tensors[name].dtype for name in match.used)),
        parameters=sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in match.leaves),
        bytes_read=bytes_read,
        seconds=seconds,
        head="\n".join(heads) or "none read",
    )
