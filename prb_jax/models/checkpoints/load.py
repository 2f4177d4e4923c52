"""Loading of weights from a Hugging Face folder directly into sharded arrays.

Each process reads only the bytes of its shards (:mod:`prb_jax.models.checkpoints.fill`). Peak host memory is the
shards plus a few megabytes on CPU, and one shard on other platforms.
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
from prb_jax.models.checkpoints.fill import (
    Match,
    fill_leaf,
    match_tensors,
    parts_by_bounds,
)
from prb_jax.models.checkpoints.hf_map import LeafMap, flatten, leaf_maps, nest
from prb_jax.models.checkpoints.locate import is_exported
from prb_jax.models.checkpoints.weight_index import SliceReader, WeightIndex, index_folder
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.head import OUTPUT_EMBEDDING_KEY
from prb_jax.seams import get

if TYPE_CHECKING:
    from prb_jax.models.model import Config
    from prb_jax.models.quantization import Form

# Readers wait for the storage, so more readers than cores are useful.
_READERS = 8


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Tensors that were read, and tensors that were not."""

    folder: str  # folder of the checkpoint
    files: tuple[str, ...]  # names of its weight files
    used_keys: tuple[str, ...]  # tensors that fill the parameters
    ignored_keys: Mapping[str, str]  # other tensors, each with the reason why it is ignored
    told: tuple[str, ...]  # notes on tensors that are converted during reading
    dtypes: Mapping[str, int]  # number of used tensors by safetensors dtype in the file
    parameters: int  # number of parameters of the whole model
    bytes_read: int  # bytes of weights that this process read
    seconds: float  # time until the weights were on the devices; 0 if nothing was read
    head: str
    """Name, shape and stored dtype of each tensor of the head, and its file if it is not in the body's file."""
    quantize: str | None  # form of the layers' matrices, if they are quantised
    bytes_unquantized: int  # size of all parameters in the requested dtypes, without quantisation
    bytes_held: int  # size of all parameters in memory

    __repr__ = short_repr


class LoadedParams(NamedTuple):
    """Parameter tree (nested dict of arrays) and report on its loading."""

    params: dict[str, Any]
    report: LoadReport


@dataclass(frozen=True)
class _Held:
    """Formats of parameters in memory."""

    dtype: DTypeLike
    head_dtype: DTypeLike | None
    quantize: str | None  # form of the layers' matrices, if quantised

    def form_of(self, leaf: LeafMap) -> Form | None:
        """Return the form of a quantised matrix, or None."""
        if self.quantize is None or not leaf.quantisable:
            return None
        return get("quantisation", "form").value(self.quantize)

    def shapes(self, leaves: tuple[LeafMap, ...]) -> dict[tuple[str, ...], tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of every array by path: leaves, and scales of quantised leaves.

        Raises:
          CheckpointError: The dtype is not floating-point.
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
    """Return the path of a matrix's scales in the parameter tree."""
    return (*leaf.path[:-1], f"{leaf.path[-1]}{form.suffix}")


def abstract_params(
    config: Config,
    *,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
    quantize: str | None = None,
) -> dict[str, Any]:
    """Return shapes and dtypes of the parameter tree of :func:`load_params`, as ``jax.ShapeDtypeStruct``, without
    allocating memory."""
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
    """Check every tensor's name, shape and dtype from headers, without reading weights; for arguments and errors see
    :func:`load_params`."""
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
      folder: Folder with ``model.safetensors``, or several files and ``model.safetensors.index.json``.
      config: Configuration from ``config.json`` of the same folder.
      dtype: Floating-point dtype of the arrays; each slice is converted during reading.
      shardings: Tree like the parameters, or one sharding for all; None is the default device.
      head_dtype: Dtype of the score head, if it differs.
      head: If False, do not read the head: neither the parameters nor `shardings` then contain "score", and the caller
        must create a new head.
      quantize: Form of the layers' matrices, one of :data:`prb_jax.models.quantization.FORMS`. Each matrix is
        quantised from the file's values, one block at a time, regardless of ``dtype``.

    Returns:
      Parameters (layers stacked on axis 0, matrices ``[in, out]``) and a report.

    Raises:
      CheckpointError: A tensor is missing, unexpected, misshapen or not floating-point; the head is missing or
        re-initialised; a file is broken, truncated or a pickle; or a file differs from the one that its training run
        exported. The message names the tensor or file.
      MeshError: A sharding does not divide its array.
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
        stored = index.files[0].parent
        checked = aside.submit(get("models", "exported").value, stored) if is_exported(stored) else None
        tied = isinstance(config, DecoderConfig) and config.tie_word_embeddings
        if tied and OUTPUT_EMBEDDING_KEY in index.tensors:
            get("models", "tied embeddings").value(index, config, reader=reader)
        # The largest leaf first: while its shard is transferred, little else is in memory.
        for leaf in sorted(match.leaves, key=lambda leaf: -local_size(leaf)):
            given: Any = {"sharding": chosen[leaf.path], "reader": reader, "pool": pool}
            if (form := held.form_of(leaf)) is None:
                loaded[leaf.path] = fill_leaf(leaf, shapes[leaf.path][1], **given)
                continue
            scales = _scale_path(leaf, form)
            loaded[leaf.path], loaded[scales] = get("quantisation", "fill").value(
                leaf, form, scale_sharding=chosen[scales], **given
            )
        if checked is not None:
            checked.result()
        seconds = time.perf_counter() - begun
        report = replace(_report(index, match, held), bytes_read=reader.bytes_read, seconds=seconds)
    return LoadedParams(nest({path: loaded[path] for path in shapes}), report)


def _index(folder: str | Path, config: Config) -> WeightIndex:
    if not isinstance(config, DecoderConfig):
        return index_folder(folder)
    index = index_folder(folder, side_files=config.layout.side_files)
    if config.experts is None and index.expert_factors:
        name, factors = next(iter(index.expert_factors.items()))
        raise CheckpointError(
            f"{factors.a.path}: the adapter updates '{name}', but its base, a {config.model_type}, has no experts: "
            "name the base model with --base"
        )
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
    """Return the report of a match, with its size in memory, without reading weights."""
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
