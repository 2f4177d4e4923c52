"""Eight-bit matrices, filled from slices of files directly into the shards of this process.

At most one block of a quantised matrix is in memory as float32 at any time. The scale of an output channel requires
the channel's whole input axis, and a block of channels is a run of rows in the file. Each block is therefore read once
over all inputs, quantised, and distributed to its shards. A process whose shards split the input axis (fsdp over
several processes) reads the whole input axis of its channels; without quantisation it reads only its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Sharding

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.checkpoints.fill import (
    Bounds,
    aligned_empty,
    parts_by_bounds,
    put,
    reads_of_tensor,
    together,
)
from prb_jax.models.checkpoints.hf_map import LeafMap
from prb_jax.models.checkpoints.weight_index import SliceReader
from prb_jax.models.quantization import Form, quantize_array

# Size of a block. Each thread needs three times this: the block as read, as float32, and its quotients.
_BLOCK_BYTES = 1 << 20


def fill_quantized(
    leaf: LeafMap,
    form: Form,
    *,
    sharding: Sharding,
    scale_sharding: Sharding,
    reader: SliceReader,
    pool: ThreadPoolExecutor,
) -> tuple[jax.Array, jax.Array]:
    """Read a matrix of all layers: [L, I, O] in ``form.dtype`` and its scales float32 [L, O]; with experts
    [L, E, I, O] and [L, E, O].

    Raises:
      CheckpointError: A weight is not finite.
      MeshError: Scales are sharded differently from their matrix.
    """
    parts, axes = parts_by_bounds(sharding, leaf.shape), len(leaf.tensors)
    scales = np.full((*leaf.tensors, leaf.shape[-1]), np.nan, np.float32)
    shards: list[jax.Array] = []
    # Parts with the same layers, experts and outputs share blocks.
    for same in dict.fromkeys((*bounds[:axes], bounds[-1]) for bounds in parts):
        *tensors, outputs = same
        buffers = {
            bounds: aligned_empty(bounds, form.dtype)
            for bounds in parts
            if (*bounds[:axes], bounds[-1]) == same
        }

        def fill_matrix(
            key: str,
            place: tuple[int, ...],
            matrices: Mapping[Bounds, np.ndarray],
            outputs: tuple[int, int],
        ) -> None:
            for start, narrow, scale in _quantized_blocks(leaf, form, key, outputs, reader):
                stop = start + len(scale)
                scales[(*place, slice(start, stop))] = scale
                for (*_, (low, high), (first, _)), matrix in matrices.items():
                    matrix[:, start - first : stop - first] = narrow[:, low:high].T

        places = itertools.product(*(range(*bounds) for bounds in tensors))
        keys = np.reshape(np.asarray(leaf.file_keys), leaf.tensors)
        firsts = [bounds[0] for bounds in tensors]
        together(
            pool,
            fill_matrix,
            (
                (
                    str(keys[place]),
                    place,
                    {bounds: buffer[tuple(np.subtract(place, firsts))] for bounds, buffer in buffers.items()},
                    outputs,
                )
                for place in places
            ),
        )
        for bounds in list(buffers):
            shards += put(buffers.pop(bounds), parts[bounds])
    matrix = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
    shards = []
    for bounds, devices in parts_by_bounds(scale_sharding, scales.shape).items():
        part = np.ascontiguousarray(scales[tuple(slice(*bound) for bound in bounds)])
        if np.isnan(part).any():
            raise MeshError(f"parameter '{leaf.name}': its scales are split in another way than its outputs")
        shards += put(part, devices)
    return matrix, jax.make_array_from_single_device_arrays(scales.shape, scale_sharding, shards)


def _quantized_blocks(
    leaf: LeafMap, form: Form, key: str, outputs: tuple[int, int], reader: SliceReader
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield first output, quantised rows [O', I] and scales [O'] for each block of a tensor's outputs."""
    inputs = leaf.shape[-2]
    channels = max(1, _BLOCK_BYTES // (4 * inputs))
    for start in range(*outputs, channels):
        stop = min(start + channels, outputs[1])
        block = np.empty((stop - start, inputs), np.float32)
        region = (slice(start, stop), slice(0, inputs))
        turned = (block, region) if leaf.transposed else (block.T, region[::-1])
        for read in reads_of_tensor(key, *turned, leaf):
            reader.read_into(*read)
        narrow, scale = quantize_array(block, form.dtype, axis=1)
        if not np.isfinite(scale).all():
            raise CheckpointError(
                f"tensor '{key}': expected finite weights, found others: it cannot be quantised"
            )
        yield start, narrow, scale
