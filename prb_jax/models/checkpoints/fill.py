"""Leaves of the parameter tree filled from slices of files, straight into the shards of this process.

A shard is filled in place, by several threads. Of a matrix that is quantised no more than a block is ever in memory in
float32: the scale of an output channel needs the channel's whole input axis, and a block of channels is a run of rows
in the file. So a block is read over all inputs once, quantised, and dealt to the shards that hold parts of it. A
process whose shards split the input axis (fsdp over several processes) reads the whole input axis of its channels,
where it would read only its part of a matrix that is not quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.checkpoints.hf_map import LeafMap
from prb_jax.models.checkpoints.weight_index import SliceReader
from prb_jax.models.quantization import Form, quantize_array

# XLA's CPU client takes over a host buffer with this alignment instead of copying it.
_ALIGNMENT = 64
# A large tensor is read by several threads.
_READ_BYTES = 16 << 20
# A block to be quantised as it is read, as float32, and its quotients: three times this in each thread.
_BLOCK_BYTES = 1 << 20

Bounds = tuple[tuple[int, int], ...]
Read = tuple[np.ndarray, str, tuple[slice, ...]]
"""What is read into where: (part of a buffer, tensor, its region), as a `SliceReader` takes it."""


def parts_by_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[Any]]:
    """The distinct parts of an array on this process, each with the devices that hold it."""
    devices_by_part: dict[Bounds, list[Any]] = {}
    for device, part in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(piece.indices(size)[:2] for piece, size in zip(part or (), shape))
        devices_by_part.setdefault(bounds, []).append(device)
    return devices_by_part


def fill_leaf(
    leaf: LeafMap, dtype: np.dtype, *, sharding: Sharding, reader: SliceReader, pool: ThreadPoolExecutor
) -> jax.Array:
    """Read a leaf; devices that hold the same part share one read."""

    def filled(bounds: Bounds) -> np.ndarray:
        buffer = _aligned_empty(bounds, dtype)
        part = tuple(slice(*bound) for bound in bounds)
        _together(pool, reader.read_into, reads_of_shard(buffer, leaf, part))
        return buffer

    shards: list[jax.Array] = []
    for bounds, devices in parts_by_bounds(sharding, leaf.shape).items():
        shards += _put(filled(bounds), devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def fill_quantized(
    leaf: LeafMap,
    form: Form,
    *,
    sharding: Sharding,
    scale_sharding: Sharding,
    reader: SliceReader,
    pool: ThreadPoolExecutor,
) -> tuple[jax.Array, jax.Array]:
    """Read a matrix of all layers: [L, I, O] in ``form.dtype`` and its scales float32 [L, O].

    Raises:
      CheckpointError: a weight that is not finite.
      MeshError: scales that are split in another way than their matrix.
    """
    parts = parts_by_bounds(sharding, leaf.shape)
    scales = np.full((leaf.shape[0], leaf.shape[2]), np.nan, np.float32)
    shards: list[jax.Array] = []
    # Parts with the same layers and outputs come from the same blocks.
    for layers, outputs in dict.fromkeys((bounds[0], bounds[2]) for bounds in parts):
        buffers = {
            bounds: _aligned_empty(bounds, form.dtype)
            for bounds in parts
            if (bounds[0], bounds[2]) == (layers, outputs)
        }

        def fill_layer(layer: int, buffers: Mapping[Bounds, np.ndarray], outputs: tuple[int, int]) -> None:
            for start, narrow, scale in _quantized_blocks(leaf, form, layer, outputs, reader):
                stop = start + len(scale)
                scales[layer, start:stop] = scale
                for ((first_layer, _), (low, high), (first, _)), buffer in buffers.items():
                    buffer[layer - first_layer, :, start - first : stop - first] = narrow[:, low:high].T

        _together(pool, fill_layer, ((layer, buffers, outputs) for layer in range(*layers)))
        for bounds in list(buffers):
            shards += _put(buffers.pop(bounds), parts[bounds])
    matrix = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
    shards = []
    for bounds, devices in parts_by_bounds(scale_sharding, scales.shape).items():
        part = np.ascontiguousarray(scales[tuple(slice(*bound) for bound in bounds)])
        if np.isnan(part).any():
            raise MeshError(f"parameter '{leaf.name}': its scales are split in another way than its outputs")
        shards += _put(part, devices)
    return matrix, jax.make_array_from_single_device_arrays(scales.shape, scale_sharding, shards)


def _quantized_blocks(
    leaf: LeafMap, form: Form, layer: int, outputs: tuple[int, int], reader: SliceReader
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """First output, quantised rows [O', I] and scales [O'] of each block of a layer's outputs."""
    inputs, key = leaf.shape[1], leaf.file_keys[layer]
    channels = max(1, _BLOCK_BYTES // (4 * inputs))
    for start in range(*outputs, channels):
        stop = min(start + channels, outputs[1])
        block = np.empty((stop - start, inputs), np.float32)
        for read in _reads_of_tensor(key, block, (slice(start, stop), slice(0, inputs)), leaf):
            reader.read_into(*read)
        narrow, scale = quantize_array(block, form.dtype, axis=1)
        if not np.isfinite(scale).all():
            raise CheckpointError(
                f"tensor '{key}': expected finite weights, found others: it cannot be quantised"
            )
        yield start, narrow, scale


def reads_of_shard(buffer: np.ndarray, leaf: LeafMap, part: tuple[slice, ...]) -> Iterator[Read]:
    """What is read for one shard: the given part of a leaf, from as many tensors as it has layers."""
    tensors = [(leaf.key, buffer)]
    if leaf.stacked:
        tensors, part = list(zip(leaf.file_keys[part[0]], buffer, strict=True)), part[1:]
    for key, target in tensors:
        turned = (target.T, part[::-1]) if leaf.transposed else (target, part)
        yield from _reads_of_tensor(key, *turned, leaf)


def _reads_of_tensor(
    key: str, target: np.ndarray, region: tuple[slice, ...], leaf: LeafMap
) -> Iterator[Read]:
    """One tensor's, target and region both as the file has them; of a tensor that holds more than the leaf, the
    region is one of the leaf's own rows."""
    first, last, done = region[0].start, region[0].stop, 0
    for start, stop in leaf.pieces or ((0, last),):  # each is rows done .. done + (stop - start) of the leaf
        low, high = max(first, done), min(last, done + stop - start)
        size = max(1, _READ_BYTES // max(1, target[:1].nbytes))
        for row in range(low, high, size):
            end = min(high, row + size)
            rows = slice(start + row - done, start + end - done)
            yield target[row - first : end - first], key, (rows, *region[1:])
        done += stop - start


def _together(
    pool: ThreadPoolExecutor, run: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> None:
    """Make these calls in the threads of a pool, and wait for all of them; none is begun after one has failed."""
    jobs = [pool.submit(run, *given) for given in arguments]
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:
            job.cancel()


def _put(buffer: np.ndarray, devices: Iterable[Any]) -> list[jax.Array]:
    """The buffer on each device; where these have memory of their own, the caller's reference was the last one."""
    return jax.block_until_ready([jax.device_put(buffer, device) for device in devices])


def _aligned_empty(bounds: Bounds, dtype: np.dtype) -> np.ndarray:
    shape = tuple(stop - start for start, stop in bounds)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
