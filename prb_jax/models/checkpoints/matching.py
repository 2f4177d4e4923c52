"""Checks, tensor by tensor, that a checkpoint and a configuration describe the same model.

Every tensor of the files fills a leaf or is listed with the reason to ignore it. Every leaf is filled: nothing is
initialised silently. Otherwise a reward model without its head would return random scores without a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.errors import CheckpointError, listed
from prb_jax.models.checkpoints.hf_map import LeafMap, ignored_reason, leaf_maps, module_name
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES, READ_DTYPES, TensorInfo
from prb_jax.models.checkpoints.weight_index import SliceReader, WeightIndex
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.head import HEAD_KEY, OUTPUT_EMBEDDING_KEY
from prb_jax.seams import get

if TYPE_CHECKING:
    from prb_jax.models.model import Config

_ROWS_COMPARED = 1024


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


def check_tied_embeddings(index: WeightIndex, config: DecoderConfig, *, reader: SliceReader) -> None:
    """Check that a stored output embedding equals the input embedding if the configuration ties them.

    Raises:
      CheckpointError: ``tie_word_embeddings`` is set but the two tensors differ, so one of them, or the
        configuration, belongs to another model.
    """
    if not config.tie_word_embeddings or OUTPUT_EMBEDDING_KEY not in index.tensors:
        return
    embedding = f"{module_name(config.layout, 'embed')}.weight"
    pair = [index.tensors[name] for name in (embedding, OUTPUT_EMBEDDING_KEY)]
    rows, columns = pair[0].shape

    def bits(tensor: TensorInfo, row: int) -> bytes:
        stop = min(row + _ROWS_COMPARED, rows)
        block = np.empty((stop - row, columns), FLOAT_DTYPES[tensor.dtype])
        reader.read_into(block, tensor.name, (slice(row, stop), slice(0, columns)))
        return block.tobytes()

    same_kind = pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype
    starts = range(0, rows, _ROWS_COMPARED)
    if not same_kind or any(bits(pair[0], row) != bits(pair[1], row) for row in starts):
        raise CheckpointError(
            f"{index.folder}: config.json says that '{OUTPUT_EMBEDDING_KEY}' is tied to '{embedding}', "
            "but the two stored tensors differ"
        )


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
