"""Weights from a Hugging Face folder straight into sharded arrays.

Each process reads only the bytes of its own shards (:mod:`prb_jax.models.checkpoints.fill`), so peak host memory is the
shards themselves plus a few megabytes on CPU, and one shard elsewhere.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from prb_jax.errors import CheckpointError, MeshError, PrbWarning, short_repr
from prb_jax.models.checkpoints.fill import fill_leaf, parts_by_bounds
from prb_jax.models.checkpoints.hf_map import LeafMap, flatten, leaf_maps, nest
from prb_jax.models.checkpoints.locate import check_exported
from prb_jax.models.checkpoints.matching import Match, check_tied_embeddings, match_tensors
from prb_jax.models.checkpoints.weight_index import SliceReader, WeightIndex, index_folder
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.seams import get

if TYPE_CHECKING:
    from prb_jax.models.model import Config
    from prb_jax.models.quantization import Form

# Readers wait for the storage, so there may be more of them than cores.
_READERS = 8


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was read and what was not."""

    folder: str  # the checkpoint
    files: tuple[str, ...]  # names of its weight files
    used_keys: tuple[str, ...]  # tensors that fill the parameters
    ignored_keys: Mapping[str, str]  # the other tensors, each with the reason why it is left aside
    told: tuple[str, ...]  # what was read otherwise than it is stored
    dtypes: Mapping[str, int]  # how many of the used tensors are stored in each safetensors dtype
    parameters: int  # number of parameters of the whole model
    bytes_read: int  # bytes of weights that this process read
    seconds: float  # that it took until they were on the devices; 0 where nothing was read
    head: str
    """Name, shape and stored dtype of each tensor of the head, and its file where that is another one than the
    body's."""
    quantize: str | None  # the form in which the layers' matrices are held, if they are quantised
    bytes_unquantized: int  # of the whole model's parameters in the dtypes asked for, without quantisation
    bytes_held: int  # of the whole model's parameters as they are held

    __repr__ = short_repr


class LoadedParams(NamedTuple):
    """The parameter tree (nested dict of arrays) and how it was read."""

    params: dict[str, Any]
    report: LoadReport


@dataclass(frozen=True)
class _Held:
    """What parameters are held in."""

    dtype: DTypeLike
    head_dtype: DTypeLike | None
    quantize: str | None  # the form of the layers' matrices, if they are quantised

    def form_of(self, leaf: LeafMap) -> Form | None:
        """The form of a matrix that is quantised."""
        if self.quantize is None or not leaf.quantisable:
            return None
        return get("quantisation", "form").value(self.quantize)

    def shapes(self, leaves: tuple[LeafMap, ...]) -> dict[tuple[str, ...], tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every array by its path, of the leaves and of the scales of quantised ones.

        Raises:
          CheckpointError: a dtype that holds no weights.
        """
        shapes: dict[tuple[str, ...], tuple[tuple[int, ...], np.dtype]] = {}
        for leaf in leaves:
            asked = self.dtype if self.head_dtype is None or not leaf.is_head else self.head_dtype
            dtype = jnp.dtype(asked)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise CheckpointError(f"weights cannot be loaded as {dtype}: expected a floating-point dtype")
            form = self.form_of(leaf)
            shapes[leaf.path] = (leaf.shape, dtype if form is None else form.dtype)
            if form is not None:
                shapes[_scale_path(leaf, form)] = ((*leaf.tensors, leaf.shape[-1]), np.dtype(np.float32))
        return shapes

    def bytes_of(self, leaves: tuple[LeafMap, ...]) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(leaves).values())


def _scale_path(leaf: LeafMap, form: Form) -> tuple[str, ...]:
    """Where the scales of a matrix lie in the tree of parameters."""
    return (*leaf.path[:-1], f"{leaf.path[-1]}{form.suffix}")


def abstract_params(
    config: Config,
    *,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
    quantize: str | None = None,
) -> dict[str, Any]:
    """Shapes and dtypes of the parameter tree that :func:`load_params` reads, as ``jax.ShapeDtypeStruct``; nothing is
    allocated."""
    shapes = _Held(dtype, head_dtype, quantize).shapes(leaf_maps(config))
    return nest({path: jax.ShapeDtypeStruct(*shape) for path, shape in shapes.items()})


def inspect_checkpoint(
    folder: str | Path,
    config: Config,
    *,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
    head: bool = True,
    quantize: str | None = None,
) -> LoadReport:
    """Check every tensor's name, shape and dtype from the headers alone, without reading weights; arguments and errors
    are those of :func:`load_params`."""
    index = _index(folder, config)
    return _report(index, match_tensors(index, config, head=head), _Held(dtype, head_dtype, quantize))


def load_params(
    folder: str | Path,
    config: Config,
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
        head, a broken or truncated file, pickle files, a file of a training run that is not the one it exported; the
        message names the tensor or file.
      MeshError: a sharding that does not divide its array.
    """
    index = _index(folder, config)
    for told in index.told:
        warnings.warn(f"{index.folder}: {told}", PrbWarning, stacklevel=2)
    match, held = match_tensors(index, config, head=head), _Held(dtype, head_dtype, quantize)
    shapes = held.shapes(match.leaves)
    chosen = _shardings_by_path({path: shape for path, (shape, _) in shapes.items()}, shardings)

    def local_size(leaf: LeafMap) -> int:
        sharding = chosen[leaf.path]
        return math.prod(sharding.shard_shape(leaf.shape)) * len(parts_by_bounds(sharding, leaf.shape))

    loaded: dict[tuple[str, ...], jax.Array] = {}
    begun = time.perf_counter()
    with (
        SliceReader(index) as reader,
        ThreadPoolExecutor(_READERS, thread_name_prefix="read") as pool,
        ThreadPoolExecutor(1, thread_name_prefix="check") as aside,
    ):
        checked = aside.submit(check_exported, index.files[0].parent)
        if isinstance(config, DecoderConfig):
            check_tied_embeddings(index, config, reader=reader)
        # The largest first: while its shard is handed over there is little else in memory.
        for leaf in sorted(match.leaves, key=lambda leaf: -local_size(leaf)):
            given: Any = {"sharding": chosen[leaf.path], "reader": reader, "pool": pool}
            if (form := held.form_of(leaf)) is None:
                loaded[leaf.path] = fill_leaf(leaf, shapes[leaf.path][1], **given)
                continue
            scales = _scale_path(leaf, form)
            loaded[leaf.path], loaded[scales] = get("quantisation", "fill").value(
                leaf, form, scale_sharding=chosen[scales], **given
            )
        checked.result()
        seconds = time.perf_counter() - begun
        report = replace(_report(index, match, held), bytes_read=reader.bytes_read, seconds=seconds)
    return LoadedParams(nest({path: loaded[path] for path in shapes}), report)


def _index(folder: str | Path, config: Config) -> WeightIndex:
    if not isinstance(config, DecoderConfig):
        return index_folder(folder)
    index = index_folder(folder, side_files=config.layout.side_files)
    return index if config.experts is None else get("experts", "tensors").value(index, config)


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


def _report(index: WeightIndex, match: Match, held: _Held) -> LoadReport:
    """What a match uses of a folder, and what it takes in memory; nothing is read."""
    body = {index.tensors[key].path for leaf in match.leaves if not leaf.is_head for key in leaf.file_keys}
    heads = []
    for tensor in (index.tensors[leaf.key] for leaf in match.leaves if leaf.is_head):
        place = "" if tensor.path in body else f" in {tensor.path.name}"
        heads.append(f"{tensor.name} {list(tensor.shape)} {tensor.dtype}{place}")
    return LoadReport(
        folder=str(index.folder),
        files=tuple(path.name for path in index.files),
        used_keys=match.used,
        ignored_keys=match.ignored,
        told=index.told,
        dtypes=dict(Counter(index.tensors[name].dtype for name in match.used)),
        parameters=sum(math.prod(leaf.shape) for leaf in match.leaves),
        bytes_read=0,
        seconds=0.0,
        head="\n".join(heads) or "none read",
        quantize=held.quantize,
        bytes_unquantized=replace(held, quantize=None).bytes_of(match.leaves),
        bytes_held=held.bytes_of(match.leaves),
    )
