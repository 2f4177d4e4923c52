"""Weights from a Hugging Face folder straight into sharded arrays.

Each process reads only the bytes of its own shards. A shard is filled in place, by several threads, from
slices of the files, so peak host memory is the shards themselves plus a few megabytes on CPU, and one
shard elsewhere.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from prb_jax.checkpoints.quantized import is_matrix, load_quantized, parts_by_bounds, scale_path
from prb_jax.checkpoints.safetensors_reader import SliceReader, WeightIndex, index_folder
from prb_jax.checkpoints.shapes import leaf_shapes, total_bytes
from prb_jax.errors import MeshError, short_repr
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.quantization import Form, quantization_form

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
      quantize: the form in which the layers' matrices are held, if they are quantised.
      bytes_unquantized: of the whole model's parameters in the dtypes asked for, without quantisation.
      bytes_held: of the whole model's parameters as they are held.
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
    quantize: str | None
    bytes_unquantized: int
    bytes_held: int

    __repr__ = short_repr


class LoadedParams(NamedTuple):
    """The parameter tree (nested dict of arrays) and how it was read."""

    params: dict[str, Any]
    report: LoadReport


def abstract_params(
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
    quantize: str | None = None,
) -> dict[str, Any]:
    """Shapes and dtypes of the parameter tree, as ``jax.ShapeDtypeStruct``; nothing is allocated.

    Args:
      config: the model.
      dtype: of every leaf.
      head_dtype: of the score head, if it differs.
      quantize: of the layers' matrices: one of :data:`prb_jax.models.quantization.FORMS`.
    """
    return abstract_leaves(
        leaf_maps(config),
        dtype=dtype,
        head_dtype=head_dtype,
        form=None if quantize is None else quantization_form(quantize),
    )


def abstract_leaves(
    leaves: Iterable[LeafMap],
    *,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
    form: Form | None = None,
) -> dict[str, Any]:
    """As :func:`abstract_params`, of any table of leaves."""
    shapes = leaf_shapes(tuple(leaves), dtype=dtype, head_dtype=head_dtype, form=form)
    return nest({path: jax.ShapeDtypeStruct(*shape) for path, shape in shapes.items()})


def inspect_checkpoint(
    folder: str | Path,
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
    head: bool = True,
    quantize: str | None = None,
) -> LoadReport:
    """Check every tensor's name, shape and dtype from the headers alone, without reading weights.

    Args:
      folder, config, dtype, head_dtype, head, quantize: as of :func:`load_params`.

    Raises:
      CheckpointError: as :func:`load_params`.
    """
    index = index_folder(folder, side_files=config.layout.side_files)
    form = None if quantize is None else quantization_form(quantize)
    match = match_tensors(index, config, head=head)
    return report_match(index, match, dtype=dtype, head_dtype=head_dtype, form=form)


def load_params(
    folder: str | Path,
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    shardings: Mapping[str, Any] | Sharding | None = None,
    head_dtype: DTypeLike | None = None,
    head: bool = True,
    quantize: str | None = None,
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
      quantize: of the layers' matrices, one of :data:`prb_jax.models.quantization.FORMS`; each is quantised
        from the file's values, a block at a time, whatever ``dtype`` is.

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
        form=None if quantize is None else quantization_form(quantize),
        check=lambda reader: check_tied_embeddings(index, config, reader=reader),
    )


def load_matched(
    index: WeightIndex,
    match: Match,
    *,
    dtype: DTypeLike = jnp.float32,
    shardings: Mapping[str, Any] | Sharding | None = None,
    head_dtype: DTypeLike | None = None,
    form: Form | None = None,
    check: Callable[[SliceReader], None] | None = None,
) -> LoadedParams:
    """Read the leaves of a match into arrays; arguments and errors as of :func:`load_params`.

    Args:
      index: of the folder.
      match: its leaves, all of which the folder fills.
      form: in which the matrices of layers are held; None for ``dtype``.
      check: what else is to be looked at before anything is loaded.
    """
    shapes = leaf_shapes(match.leaves, dtype=dtype, head_dtype=head_dtype, form=form)
    chosen = _shardings_by_path({path: shape for path, (shape, _) in shapes.items()}, shardings)
    # The largest first: while its shard is handed over there is little else in memory.
    order = sorted(match.leaves, key=lambda leaf: -_local_size(leaf, chosen[leaf.path]))
    loaded: dict[tuple[str, ...], jax.Array] = {}
    begun = time.perf_counter()
    with SliceReader(index) as reader, ThreadPoolExecutor(_READERS, thread_name_prefix="read") as pool:
        if check is not None:
            check(reader)
        for leaf in order:
            if form is None or not is_matrix(leaf):
                loaded[leaf.path] = _load_leaf(
                    leaf, chosen[leaf.path], shapes[leaf.path][1], reader=reader, pool=pool
                )
                continue
            scales = scale_path(leaf, form)
            loaded[leaf.path], loaded[scales] = load_quantized(
                leaf,
                form,
                sharding=chosen[leaf.path],
                scale_sharding=chosen[scales],
                read=functools.partial(_read_region, leaf, reader=reader),
                empty=_aligned_empty,
                pool=pool,
            )
        report = report_match(
            index,
            match,
            dtype=dtype,
            head_dtype=head_dtype,
            form=form,
            bytes_read=reader.bytes_read,
            seconds=time.perf_counter() - begun,
        )
    return LoadedParams(nest({path: loaded[path] for path in shapes}), report)


def _load_leaf(
    leaf: LeafMap, sharding: Sharding, dtype: np.dtype, *, reader: SliceReader, pool: ThreadPoolExecutor
) -> jax.Array:
    shards = []
    for bounds, devices in parts_by_bounds(sharding, leaf.shape).items():
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
    tensors = [(leaf.key, buffer)]
    if leaf.stacked:
        tensors, part = list(zip(leaf.file_keys[part[0]], buffer, strict=True)), part[1:]
    for key, target in tensors:
        turned = (target.T, part[::-1]) if leaf.transposed else (target, part)
        yield from _tasks_in_file(key, *turned, leaf)


def _tasks_in_file(key: str, target: np.ndarray, region: tuple[slice, ...], leaf: LeafMap) -> Iterator[Task]:
    """One tensor's, target and region both as the file has them; of a tensor that holds more than the leaf, the
    region is one of the leaf's own rows."""
    first, last, done = region[0].start, region[0].stop, 0
    for start, stop in leaf.pieces or ((0, last),):  # each is rows done .. done + (stop - start) of the leaf
        low, high = max(first, done), min(last, done + stop - start)
        size = max(1, _TASK_BYTES // max(1, target[:1].nbytes))
        for row in range(low, high, size):
            end = min(high, row + size)
            rows = slice(start + row - done, start + end - done)
            yield target[row - first : end - first], key, (rows, *region[1:])
        done += stop - start


def _read_region(
    leaf: LeafMap, key: str, target: np.ndarray, region: tuple[slice, ...], *, reader: SliceReader
) -> None:
    """Fill ``target`` with a region of the tensor ``key``, as :func:`_tasks_in_file` has them."""
    for task in _tasks_in_file(key, target, region, leaf):
        reader.read_into(*task)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _shardings_by_path(
    shapes: Mapping[tuple[str, ...], tuple[int, ...]], shardings: Mapping[str, Any] | Sharding | None
) -> dict[tuple[str, ...], Sharding]:
    if shardings is None:
        shardings = SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(shardings, Sharding):
        chosen = dict.fromkeys(shapes, shardings)
    else:
        chosen = flatten(shardings)
        if chosen.keys() != shapes.keys():
            names = sorted("/".join(path) for path in chosen.keys() ^ shapes.keys())
            raise MeshError(
                f"shardings and parameters are not the same tree: they differ in {', '.join(names)}"
            )
    for path, shape in shapes.items():
        try:
            chosen[path].shard_shape(shape)
        except ValueError as error:
            raise MeshError(
                f"parameter '{'/'.join(path)}' of shape {list(shape)} cannot be sharded as {chosen[path]}: {error}"
            ) from error
    return chosen


def _local_size(leaf: LeafMap, sharding: Sharding) -> int:
    parts = {str(part) for part in sharding.addressable_devices_indices_map(leaf.shape).values()}
    return int(np.prod(sharding.shard_shape(leaf.shape), dtype=np.int64)) * len(parts)


def report_match(
    index: WeightIndex,
    match: Match,
    *,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
    form: Form | None = None,
    bytes_read: int = 0,
    seconds: float = 0.0,
) -> LoadReport:
    """What a match uses of a folder, and what it takes in memory in these dtypes."""
    sized = functools.partial(leaf_shapes, match.leaves, dtype=dtype, head_dtype=head_dtype)
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
        quantize=None if form is None else form.name,
        bytes_unquantized=total_bytes(sized(form=None)),
        bytes_held=total_bytes(sized(form=form)),
    )
