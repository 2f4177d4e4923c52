"""Quantised matrices straight from a checkpoint: no matrix is ever in memory as a whole in float32.

The scale of an output channel needs the channel's whole input axis, and a block of channels is a run of
rows in the file. So a block is read over all inputs once, quantised, and dealt to the shards that hold
parts of it. A process whose shards split the input axis (fsdp over several processes) reads the whole
input axis of its channels, where it would read only its part of a matrix that is not quantised.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from prb_jax.checkpoints.hf_map import LeafMap
from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.quantization import MATRICES, Form, quantize_array

# The block as it is read, as float32, and its quotients: three times this in each thread.
_BLOCK_BYTES = 1 << 20

Bounds = tuple[tuple[int, int], ...]
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
Read = Callable[[str, np.ndarray, tuple[slice, ...]], None]


def is_matrix(leaf: LeafMap) -> bool:
    """Whether a leaf is one of the matrices that are quantised."""
    return leaf.path[0] == "layers" and leaf.path[-1] in MATRICES


def scale_path(leaf: LeafMap, form: Form) -> tuple[str, ...]:
    """Where the scales of a matrix lie in the tree of parameters."""
    return (*leaf.path[:-1], f"{leaf.path[-1]}{form.suffix}")


def parts_by_bounds(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[Any]]:
    """The distinct parts of an array on this process, each with the devices that hold it."""
    devices_by_part: dict[Bounds, list[Any]] = {}
    for device, part in sharding.addressable_devices_indices_map(shape).items():
        bounds = [piece.indices(size)[:2] for piece, size in zip(part or (), shape)]
        devices_by_part.setdefault(tuple(bounds), []).append(device)
    return devices_by_part


def load_quantized(
    leaf: LeafMap,
    form: Form,
    *,
    sharding: Sharding,
    scale_sharding: Sharding,
    read: Read,
    empty: Empty,
    pool: ThreadPoolExecutor,
) -> tuple[jax.Array, jax.Array]:
    """A matrix of all layers [L, I, O] in ``form.dtype`` and its scales float32 [L, O].

    Args:
      leaf: the matrix.
      form: how it is quantised.
      sharding: of the matrix.
      scale_sharding: of the scales, whose output axis is split as the matrix's.
      read: fills an array [O', I'] with a region of one of the leaf's tensors as the file has it.
      empty: makes the buffers that are handed to devices.
      pool: threads that read.

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
            bounds: empty(tuple(stop - start for start, stop in bounds), form.dtype)
            for bounds in parts
            if (bounds[0], bounds[2]) == (layers, outputs)
        }
        jobs = [
            pool.submit(_fill_layer, leaf, form, layer, outputs, buffers, scales, read)
            for layer in range(*layers)
        ]
        for job in jobs:
            job.result()
        for bounds, buffer in buffers.items():
            shards += jax.block_until_ready([jax.device_put(buffer, device) for device in parts[bounds]])
        del buffers
    matrix = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
    return matrix, _placed_scales(scales, scale_sharding, leaf)


def _fill_layer(
    leaf: LeafMap,
    form: Form,
    layer: int,
    outputs: tuple[int, int],
    buffers: Mapping[Bounds, np.ndarray],
    scales: np.ndarray,
    read: Read,
) -> None:
    inputs = leaf.shape[1]
    channels = max(1, _BLOCK_BYTES // (4 * inputs))
    for start in range(*outputs, channels):
        stop = min(start + channels, outputs[1])
        block = np.empty((stop - start, inputs), np.float32)
        read(leaf.file_keys[layer], block, (slice(start, stop), slice(0, inputs)))
        narrow, scale = quantize_array(block, form.dtype, axis=1)
        if not np.isfinite(scale).all():
            raise CheckpointError(
                f"tensor '{leaf.file_keys[layer]}': expected finite weights, found others: it cannot be quantised"
            )
        scales[layer, start:stop] = scale
        for bounds, buffer in buffers.items():
            (first_layer, _), (low, high), (first, _) = bounds
            buffer[layer - first_layer, :, start - first : stop - first] = narrow[:, low:high].T


def _placed_scales(scales: np.ndarray, sharding: Sharding, leaf: LeafMap) -> jax.Array:
    shards = []
    for bounds, devices in parts_by_bounds(sharding, scales.shape).items():
        part = np.ascontiguousarray(scales[tuple(slice(*bound) for bound in bounds)])
        if np.isnan(part).any():
            raise MeshError(f"parameter '{leaf.name}': its scales are split in another way than its outputs")
        shards += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(scales.shape, sharding, shards)
