"""Checkpoints with all experts of a layer in one tensor, read as if each expert had separate tensors.

The numbers of an expert are contiguous in the file, so nothing is copied. Weights of gpt-oss may be MXFP4: blocks of
32 four-bit numbers share an eight-bit scale (OCP Microscaling Formats, version 1.0, sections 5.3.3 and 5.4.1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.weight_file import ITEM_SIZES, TensorInfo
from prb_jax.models.checkpoints.weight_index import ExpertFactors, SliceReader, Update, WeightIndex
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.experts import Experts

_MERGED = re.compile(r"(?P<layer>.*\.layers\.\d+\.)mlp\.experts\.(?P<name>gate_up_proj|down_proj)")
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK = 32  # numbers per scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = np.asarray([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.float32)
"""Values of E2M1 by bit pattern: one sign bit, two exponent bits, one mantissa bit."""
_BIAS, _NOT_A_NUMBER = 127, 255  # E8M0: 2 ** (bits - 127)


def one_by_one(index: WeightIndex, config: DecoderConfig) -> WeightIndex:
    """Return the index with separate tensors for each expert, under the names of `LeafMap.file_keys`.

    Raises:
      CheckpointError: A tensor of all experts has another shape or exists in addition to separate tensors, or blocks
        have no scales.
    """
    experts = config.experts
    assert experts is not None
    tensors, updates, names = dict(index.tensors), dict(index.updates), experts.names
    found: dict[str, TensorInfo] = {}
    merged = packed = 0
    for name in index.tensors:
        parts = _MERGED.fullmatch(name.removesuffix(_BLOCKS))
        if parts is None:
            continue
        keys, shape = _parts(parts["name"], config, experts)
        keys = [f"{parts['layer']}{key}" for key in keys]
        if name.endswith(_BLOCKS):
            packed += 1
            for key, info, update in _unpacked(tensors, name, keys[0], shape, experts):
                found[key], updates[key] = info, update
        else:
            merged += 1
            found |= _sliced(tensors.pop(name), keys, shape, experts)
    for name in [name for name in tensors if name.endswith(f".{names.merged_router}.weight")]:
        key = f"{name.removesuffix(f'{names.merged_router}.weight')}{names.router}.weight"
        found[key] = replace(tensors.pop(name), name=key)
    if twice := sorted(found.keys() & tensors.keys()):
        raise CheckpointError(
            f"{index.folder}: tensor '{twice[0]}' is there twice, alone and in one of all experts"
        )
    told = list(index.told)
    if merged and not names.gate_up:
        told.append(f"{merged} tensors of all experts of a layer are read as one for each expert")
    if packed:
        told.append(f"{packed} tensors of MXFP4 are multiplied by their scales of blocks of {_BLOCK}")
    every = {**tensors, **found}
    updates |= _adapted(index, every, updates, config, experts)
    return replace(index, tensors=every, updates=updates, told=tuple(told), expert_factors={})


def _adapted(
    index: WeightIndex,
    tensors: Mapping[str, TensorInfo],
    updates: Mapping[str, Update],
    config: DecoderConfig,
    experts: Experts,
) -> dict[str, Update]:
    """Return the adapters' updates of each expert's tensors.

    Raises:
      CheckpointError: The adapters belong to other experts, or miss layers.
    """
    layers = [layer for layer in range(config.num_hidden_layers) if layer not in experts.dense]
    names = dict.fromkeys(name.rpartition(".")[2] for name in index.expert_factors)
    stem = f"{config.layout.prefix}layers."
    expected = {f"{stem}{layer}.mlp.experts.{name}": layer for name in names for layer in layers}
    if other := sorted(expected.keys() ^ index.expert_factors.keys()):
        path = next(iter(index.expert_factors.values())).a.path
        raise CheckpointError(
            f"{path}: expected adapters of the experts of every layer with experts: the base and the adapter differ in "
            f"'{other[0]}'"
        )
    found: dict[str, Update] = {}
    for parameter, layer in expected.items():
        factors, turned = index.expert_factors[parameter], not experts.names.gate_up
        keys, shape = _parts(parameter.rpartition(".")[2], config, experts)
        outputs, inputs = shape if turned else shape[::-1]
        sizes = ((experts.count * factors.rank, inputs), (outputs * len(keys), experts.count * factors.rank))
        for tensor, size in zip((factors.a, factors.b), sizes, strict=True):
            _check_shape(tensor, size)
        for number in range(experts.count * len(keys)):
            expert, which = divmod(number, len(keys))
            name = f"{stem}{layer}.{keys[which].format(expert=expert)}"
            if name in tensors:  # a missing tensor is reported when tensors are matched
                found[name] = _LowRankExpert(
                    factors,
                    expert,
                    experts.count,
                    first=which * outputs,
                    turned=turned,
                    before=updates.get(name),
                )
    return found


@dataclass(frozen=True)
class _LowRankExpert:
    """W + scale * B A of one expert."""

    factors: ExpertFactors
    expert: int
    count: int  # E
    _: KW_ONLY
    first: int  # first output of this matrix in B
    turned: bool  # W is [O, I]; otherwise [I, O]
    before: Update | None  # update of W itself

    def __call__(
        self, reader: SliceReader, out: np.ndarray, tensor: TensorInfo, region: tuple[slice, ...]
    ) -> None:
        merged = np.empty(out.shape, np.float32)
        reader.read(merged, tensor, region, self.before)
        sides = [slice(*part.indices(size)[:2]) for part, size in zip(region, tensor.shape, strict=True)]
        outputs, inputs = sides if self.turned else sides[::-1]
        rank, columns = self.factors.rank, self.factors.rank * self.count
        a = np.empty((rank, inputs.stop - inputs.start), np.float32)
        reader.read(a, self.factors.a, (slice(self.expert * rank, (self.expert + 1) * rank), inputs))
        b = np.empty((outputs.stop - outputs.start, columns), np.float32)
        rows = slice(self.first + outputs.start, self.first + outputs.stop)
        reader.read(b, self.factors.b, (rows, slice(0, columns)))
        update = np.float32(self.factors.scale) * (b[:, self.expert :: self.count] @ a)
        merged += update if self.turned else update.T
        out[...] = merged.astype(out.dtype)


def _parts(name: str, config: DecoderConfig, experts: Experts) -> tuple[list[str], tuple[int, int]]:
    """Return the names, without the layer, of one expert's tensors in a tensor of all experts, and their shape."""
    names, width, size = experts.names, config.hidden_size, experts.size
    both = name == "gate_up_proj"
    if names.gate_up:
        return ([names.gate_up], (width, 2 * size)) if both else ([names.down], (size, width))
    if both:
        return [f"{names.gate}.weight", f"{names.up}.weight"], (size, width)
    return [f"{names.down}.weight"], (width, size)


def _sliced(
    tensor: TensorInfo, keys: list[str], shape: tuple[int, int], experts: Experts
) -> dict[str, TensorInfo]:
    expected = (experts.count, len(keys) * shape[0], shape[1])
    _check_shape(tensor, expected)
    # Matching reports an unknown dtype later.
    nbytes = math.prod(shape) * ITEM_SIZES.get(tensor.dtype, 0)
    found = {}
    for number in range(experts.count * len(keys)):
        expert, which = divmod(number, len(keys))
        key = keys[which].format(expert=expert)
        start = tensor.start + number * nbytes
        found[key] = replace(tensor, name=key, shape=shape, start=start, nbytes=nbytes)
    return found


def _unpacked(
    tensors: dict[str, TensorInfo], name: str, key: str, shape: tuple[int, int], experts: Experts
) -> list[tuple[str, TensorInfo, Update]]:
    """Remove blocks and scales from the tensors, and return name, location and reader of each expert's matrix."""
    plain = name.removesuffix(_BLOCKS)
    blocks, scales = tensors.pop(name), tensors.pop(f"{plain}{_SCALES}", None)
    if scales is None:
        raise CheckpointError(
            f"{blocks.path}: tensor '{name}': expected its scales '{plain}{_SCALES}', found none"
        )
    inputs, outputs = shape
    if not experts.names.gate_up or inputs % _BLOCK:
        raise CheckpointError(
            f"{blocks.path}: tensor '{name}': MXFP4 is read for gpt_oss only, in whole blocks of {_BLOCK}"
        )
    per_row = inputs // _BLOCK
    _check_shape(blocks, (experts.count, outputs, per_row, _BLOCK // 2))
    _check_shape(scales, (experts.count, outputs, per_row))
    found = []
    for expert in range(experts.count):
        parts = [
            replace(
                tensor,
                shape=(outputs, width),
                start=tensor.start + expert * outputs * width,
                nbytes=outputs * width,
            )
            for tensor, width in ((blocks, inputs // 2), (scales, per_row))
        ]
        if {part.dtype for part in parts} != {"U8"}:
            raise CheckpointError(f"{blocks.path}: tensor '{name}' and its scales: expected U8")
        named = key.format(expert=expert)
        info = replace(blocks, name=named, dtype="BF16", shape=shape)
        found.append((named, info, _Packed(*parts)))
    return found


def _check_shape(tensor: TensorInfo, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise CheckpointError(
            f"{tensor.path}: tensor '{tensor.name}': expected shape {list(expected)}, found {list(tensor.shape)}"
        )


@dataclass(frozen=True)
class _Packed:
    """An MXFP4 matrix [I, O] with blocks along I."""

    blocks: TensorInfo  # [O, I / 2]: the lower four bits of a byte contain the earlier number
    scales: TensorInfo  # [O, I / 32]

    def __call__(
        self, reader: SliceReader, out: np.ndarray, tensor: TensorInfo, region: tuple[slice, ...]
    ) -> None:
        (first, last, _), (start, stop, _) = (
            part.indices(size) for part, size in zip(region, tensor.shape, strict=True)
        )
        outputs, low, high = slice(start, stop), first // _BLOCK, -(-last // _BLOCK)
        packed = np.empty((stop - start, (high - low) * _BLOCK // 2), np.uint8)
        reader.read(packed, self.blocks, (outputs, slice(low * _BLOCK // 2, high * _BLOCK // 2)))
        bits = np.empty((stop - start, high - low), np.uint8)
        reader.read(bits, self.scales, (outputs, slice(low, high)))
        if (bits == _NOT_A_NUMBER).any():
            raise CheckpointError(
                f"{self.scales.path}: tensor '{self.scales.name}': a scale is not a number (255 of E8M0)"
            )
        numbers = np.empty((stop - start, packed.shape[1], 2), np.float32)
        numbers[..., 0], numbers[..., 1] = _FP4[packed & 15], _FP4[packed >> 4]
        blocks = numbers.reshape(stop - start, high - low, _BLOCK)
        values = np.ldexp(blocks, bits.astype(np.int32)[..., None] - _BIAS).reshape(stop - start, -1)
        offset = low * _BLOCK
        out[...] = values[:, first - offset : last - offset].T.astype(out.dtype)
