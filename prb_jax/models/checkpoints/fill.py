"""Leaves of the parameter tree, filled from slices of files directly into the shards of this process.

Several threads fill a shard in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from prb_jax.models.checkpoints.hf_map import LeafMap
from prb_jax.models.checkpoints.weight_index import SliceReader

# XLA's CPU client uses a host buffer with this alignment without copying it.
_ALIGNMENT = 64
# Several threads read a large tensor.
_READ_BYTES = 16 << 20

Bounds = tuple[tuple[int, int], ...]
Read = tuple[np.ndarray, str, tuple[slice, ...]]
"""One read: (part of a buffer, tensor, region of the tensor), the arguments of a `SliceReader`."""


def parts_by_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[Any]]:
    """Return the distinct parts of an array on this process, each with its devices."""
    devices_by_part: dict[Bounds, list[Any]] = {}
    for device, part in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(piece.indices(size)[:2] for piece, size in zip(part or (), shape))
        devices_by_part.setdefault(bounds, []).append(device)
    return devices_by_part


def fill_leaf(
    leaf: LeafMap, dtype: np.dtype, *, sharding: Sharding, reader: SliceReader, pool: ThreadPoolExecutor
) -> jax.Array:
    """Read a leaf; devices with the same part share one read."""

    def filled(bounds: Bounds) -> np.ndarray:
        buffer = aligned_empty(bounds, dtype)
        part = tuple(slice(*bound) for bound in bounds)
        together(pool, reader.read_into, reads_of_shard(buffer, leaf, part))
        return buffer

    shards: list[jax.Array] = []
    for bounds, devices in parts_by_bounds(sharding, leaf.shape).items():
        shards += put(filled(bounds), devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def reads_of_shard(buffer: np.ndarray, leaf: LeafMap, part: tuple[slice, ...]) -> Iterator[Read]:
    """Yield the reads for one shard, a part of a leaf: one tensor for each of its layers and experts."""
    axes = len(leaf.tensors)
    keys = np.reshape(np.asarray(leaf.file_keys), leaf.tensors)[(*part[:axes], ...)]
    part = part[axes:]
    for place in np.ndindex(keys.shape):
        key, target = str(keys[place]), buffer[place]
        turned = (target.T, part[::-1]) if leaf.transposed else (target, part)
        yield from reads_of_tensor(key, *turned, leaf)


def reads_of_tensor(key: str, target: np.ndarray, region: tuple[slice, ...], leaf: LeafMap) -> Iterator[Read]:
    """Yield the reads of one tensor, with target and region in the file's orientation. If the tensor contains more
    than the leaf, the region refers to rows of the leaf."""
    first, last, done = region[0].start, region[0].stop, 0
    for start, stop in leaf.pieces or (
        (0, last),
    ):  # each piece is rows done .. done + (stop - start) of the leaf
        low, high = max(first, done), min(last, done + stop - start)
        size = max(1, _READ_BYTES // max(1, target[:1].nbytes))
        for row in range(low, high, size):
            end = min(high, row + size)
            rows = slice(start + row - done, start + end - done)
            yield target[row - first : end - first], key, (rows, *region[1:])
        done += stop - start


def together(
    pool: ThreadPoolExecutor, run: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> None:
    """Run calls in a thread pool and wait for all; after a failure no further call starts."""
    jobs = [pool.submit(run, *given) for given in arguments]
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:
            job.cancel()


def put(buffer: np.ndarray, devices: Iterable[Any]) -> list[jax.Array]:
    """Copy the buffer to each device; for devices with separate memory the caller must hold the last reference."""
    return jax.block_until_ready([jax.device_put(buffer, device) for device in devices])


def aligned_empty(bounds: Bounds, dtype: np.dtype) -> np.ndarray:
    """Return an array for a part, aligned so that XLA's CPU client uses it without a copy."""
    shape = tuple(stop - start for start, stop in bounds)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
