"""Weights from a Hugging Face folder straight into sharded arrays.

Each process reads only the bytes of its own shards. A shard is filled in place, layer by layer, from
slices of the file, so peak host memory is the shards themselves plus a few megabytes on CPU, and one
shard elsewhere.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
_MAX_READERS = 4


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
    return abstract_leaves(leaf_maps(config), dtype=dtype, head_dtype=head_dtype)


def abstract_leaves(
    leaves: Iterable[LeafMap], *, dtype: DTypeLike = jnp.float32, head_dtype: DTypeLike | None = None
) -> dict[str, Any]:
    """As :func:`abstract_params`, of any table of leaves."""
    return nest(
        {leaf.path: jax.ShapeDtypeStruct(leaf.shape, _dtype_of(leaf, dtype, head_dtype)) for leaf in leaves}
    )


def inspect_checkpoint(folder: str | Path, config: DecoderConfig) -> LoadReport:
    """Check every tensor's name, shape and dtype from the headers alone, without reading weights.

    Raises:
      CheckpointError: as :func:`load_params`.
    """
    index = index_folder(folder, side_files=config.layout.side_files)
    return report_match(index, match_tensors(index, config))


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
    return load_matched(
        index,
        match,
        dtype=dtype,
        shardings=shardings,
        head_dtype=head_dtype,
        check=lambda reader: check_tied_embeddings(index, config, reader=reader),
    )


def load_matched(
    index: WeightIndex,
    match: Match,
    *,
    dtype: DTypeLike = jnp.float32,
    shardings: Mapping[str, Any] | Sharding | None = None,
    head_dtype: DTypeLike | None = None,
    check: Callable[[SliceReader], None] | None = None,
) -> LoadedParams:
    """Read the leaves of a match into arrays; arguments and errors as of :func:`load_params`.

    Args:
      index: of the folder.
      match: its leaves, all of which the folder fills.
      check: what else is to be looked at before anything is loaded.
    """
    chosen = _shardings_by_path(match.leaves, shardings)
    # The largest first: while its shard is handed over there is little else in memory.
    order = sorted(match.leaves, key=lambda leaf: -_local_size(leaf, chosen[leaf.path]))
    loaded: dict[tuple[str, ...], jax.Array] = {}
    readers = min(_MAX_READERS, os.cpu_count() or 1)
    with SliceReader(index) as reader, ThreadPoolExecutor(readers) as pool:
        if check is not None:
            check(reader)
        for leaf in order:
            loaded[leaf.path] = _load_leaf(
                leaf, chosen[leaf.path], _dtype_of(leaf, dtype, head_dtype), reader=reader, pool=pool
            )
        report = report_match(index, match, bytes_read=reader.bytes_read)
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
    """Read one shard: the given part of a leaf, from as many tensors as it has layers."""

    def fill_one(key: str, target: np.ndarray, region: tuple[slice, ...]) -> None:
        if leaf.transposed:
            target, region = target.T, region[::-1]
        if leaf.pieces is None:
            reader.read_into(target, key, region)
            return
        first, last, done = region[0].start, region[0].stop, 0
        for start, stop in leaf.pieces:  # each is rows done .. done + (stop - start) of the leaf
            low, high = max(first, done), min(last, done + stop - start)
            if low < high:
                rows = slice(start + low - done, start + high - done)
                reader.read_into(target[low - first : high - first], key, (rows, *region[1:]))
            done += stop - start

    if not leaf.stacked:
        fill_one(leaf.key, buffer, part)
        return
    keys = leaf.file_keys[part[0]]
    jobs = [pool.submit(fill_one, key, buffer[number], part[1:]) for number, key in enumerate(keys)]
    for job in jobs:
        job.result()


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


def report_match(index: WeightIndex, match: Match, *, bytes_read: int = 0) -> LoadReport:
    """What a match uses of a folder."""
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
        head="\n".join(heads) or "none read",
    )
