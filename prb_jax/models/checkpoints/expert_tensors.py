"""Checkpoints that keep all experts of a layer in one tensor, read as if each expert had tensors of its own."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.weight_file import ITEM_SIZES, TensorInfo
from prb_jax.models.checkpoints.weight_index import WeightIndex
from prb_jax.models.config.decoder import DecoderConfig

_MERGED = re.compile(r"(?P<layer>.*\.layers\.\d+\.)mlp\.experts\.(?P<name>gate_up_proj|down_proj)")


def one_by_one(index: WeightIndex, config: DecoderConfig) -> WeightIndex:
    """Return the index of a checkpoint with the tensors of each expert, named as older files name them.

    transformers 5 can save ``mlp.experts.gate_up_proj`` [E, 2F, D] and ``mlp.experts.down_proj`` [E, D, F]. The rows of
    an expert lie together in the file, so that nothing is copied.

    Raises:
      CheckpointError: such a tensor has another shape, or is there beside those of each expert.
    """
    experts, merged = config.experts, [name for name in index.tensors if _MERGED.fullmatch(name)]
    if experts is None or not merged:
        return index
    tensors, names = dict(index.tensors), experts.names
    width, size = config.hidden_size, experts.size
    found: dict[str, TensorInfo] = {}
    for name in merged:
        tensor, parts = tensors.pop(name), _MERGED.fullmatch(name)
        assert parts is not None
        both = parts["name"] == "gate_up_proj"
        expected = (experts.count, 2 * size, width) if both else (experts.count, width, size)
        if tensor.shape != expected:
            raise CheckpointError(
                f"{tensor.path}: tensor '{name}': expected shape {list(expected)}, found {list(tensor.shape)}"
            )
        keys = (names.gate, names.up) if both else (names.down,)
        shape = (expected[1] // len(keys), expected[2])
        nbytes = math.prod(shape) * ITEM_SIZES[tensor.dtype]
        for number in range(experts.count * len(keys)):
            expert, which = divmod(number, len(keys))
            key = f"{parts['layer']}{keys[which].format(expert=expert)}.weight"
            start = tensor.start + number * nbytes
            found[key] = replace(tensor, name=key, shape=shape, start=start, nbytes=nbytes)
    for name in [name for name in tensors if name.endswith(f".{names.merged_router}.weight")]:
        key = f"{name.removesuffix(f'{names.merged_router}.weight')}{names.router}.weight"
        found[key] = replace(tensors.pop(name), name=key)
    if twice := sorted(found.keys() & tensors.keys()):
        raise CheckpointError(
            f"{index.folder}: tensor '{twice[0]}' is there twice, alone and in one of all experts"
        )
    told = f"{len(merged)} tensors of all experts of a layer are read as one for each expert"
    return replace(index, tensors={**tensors, **found}, told=(*index.told, told))
