"""Tensors of a checkpoint: matched with the leaves of the parameter tree, and read into the shards of this process.

Every tensor of the files fills a leaf or is listed with the reason to ignore it. Every leaf is filled: nothing is
initialised silently. Otherwise a reward model without its head would return random scores without a warning. Several
threads fill a shard in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from prb_jax.errors import CheckpointError, listed
from prb_jax.models.checkpoints.hf_map import LeafMap, ignored_reason, leaf_maps
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES, READ_DTYPES, TensorInfo
from prb_jax.models.checkpoints.weight_index import SliceReader, WeightIndex
from prb_jax.models.head import HEAD_KEY
from prb_jax.seams import get

if TYPE_CHECKING:
    from prb_jax.models.model import Config


@dataclass(frozen=True, kw_only=True)
class Match:
    """Use of the tensors of a checkpoint."""

    leaves: tuple[LeafMap, ...]  # all filled by the checkpoint
    used: tuple[str, ...]  # names of tensors that fill the leaves
    ignored: Mapping[str, str]  # names of other tensors, each with the reason


def match_tensors(index: WeightIndex, config: Config, *, head: bool = True) -> Match:
    """Pair the tensors of a folder with the leaves of the parameter tree; without ``head`` a stored head is ignored.

    Raises:
      CheckpointError: The score head is missing or its width is not ``num_labels``; or a tensor is missing, does not
        belong to this architecture, has another shape, or is not floating-point.
    """
    leaves = tuple(leaf for leaf in leaf_maps(config) if head or not leaf.is_head)
    # A tensor may fill several leaves, e.g. a fused matrix.
    wanted = [(key, leaf) for leaf in leaves for key in leaf.file_keys]
    expected = dict.fromkeys(key for key, _ in wanted)
    missing = [key for key in expected if key not in index.tensors]
    aside = {
        name: "replaced by a new head" if name == HEAD_KEY and not head else ignored_reason(name, config)
        for name in sorted(index.tensors)
        if name not in expected
    }
    extra = [name for name in index.tensors if name in aside and aside[name] is None]
    if HEAD_KEY in missing:
        raise get("weights explained", "head").value(index, extra)
    if missing or extra:
        parts = [f"{len(missing)} missing: {_shown(missing)}"] if missing else []
        if extra:
            parts.append(f"{len(extra)} that {config.model_type} has no place for: {_shown(extra)}")
        raise CheckpointError(
            f"{index.folder}: the tensors are not those of config.json: {'; '.join(parts)}; get weights and "
            "config.json of one model, or, if these are its head, name their row of the table of reward models with "
            "--readout"
        )
    for key, leaf in wanted:
        _check_tensor(index.tensors[key], leaf, config, scaled=key in index.updates)
    ignored = {name: reason for name, reason in aside.items() if reason is not None}
    return Match(leaves=leaves, used=tuple(expected), ignored=ignored)


def _check_tensor(tensor: TensorInfo, leaf: LeafMap, config: Config, *, scaled: bool) -> None:
    if tensor.dtype not in FLOAT_DTYPES and not (scaled and tensor.dtype in READ_DTYPES):
        raise CheckpointError(
            f"{tensor.path}: tensor '{tensor.name}': expected floating-point weights, found {tensor.dtype} "
            "(quantised weights are not supported)"
        )
    if tensor.shape == leaf.file_shape:
        return
    hint = ""
    if tensor.name == HEAD_KEY and len(tensor.shape) == 2 and tensor.shape[1] == config.hidden_size:
        stated = "num_labels" in config.original or config.original.get("id2label") is not None
        says = "says" if stated else "gives no num_labels, which means"
        hint = (
            f": config.json {says} {config.num_labels} labels; "
            f'if the head is right, set "num_labels": {tensor.shape[0]} there'
        )
    raise CheckpointError(
        f"{tensor.path}: tensor '{tensor.name}': expected shape {list(leaf.file_shape)}, "
        f"found {list(tensor.shape)}{hint}"
    )


def _shown(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names])


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
