"""Four-bit matrices of bitsandbytes (NF4 and FP4 of QLoRA, Dettmers et al., 2023), dequantised during reading.

A matrix is stored as a sequence of numbers, two per byte, the first in the upper half. Each number is an index into a
table of 16 values, scaled by the largest absolute value of its block. With double quantisation these scales are bytes:
indices into a table of 256 values, times the scale of a block of scales, plus an offset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES, TensorInfo
from prb_jax.models.checkpoints.weight_index import QUANT_STATE, SliceReader, Update
from prb_jax.records.files import open_file
from prb_jax.records.reading import parse_json

_KINDS = ("nf4", "fp4")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PLACES, _SCALE_PLACES = 16, 256  # sizes of the two tables


def four_bits(
    tensors: Mapping[str, TensorInfo],
) -> tuple[dict[str, TensorInfo], dict[str, Update], list[str]]:
    """Return the tensors with matrices in place of packed bytes, the updates that compute the matrices, and notes.

    Raises:
      CheckpointError: A part of a matrix's state is missing, or the state does not fit the matrix.
    """
    plain, updates, kinds = dict(tensors), dict[str, Update](), set[str]()
    for state in [tensor for name, tensor in tensors.items() if QUANT_STATE in name]:
        name, _, kind = state.name.partition(QUANT_STATE)
        matrix, update = _read_state(tensors, name, state, kind)
        del plain[state.name]
        for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
            plain.pop(f"{name}.{part}", None)
        plain[name], updates[name] = matrix, update
        kinds.add(f"{kind} to {update.dtype}")
    told = f"{len(updates)} matrices of bitsandbytes are dequantised ({', '.join(sorted(kinds))})"
    return plain, updates, [told] if updates else []


def _read_state(
    tensors: Mapping[str, TensorInfo], name: str, state: TensorInfo, kind: str
) -> tuple[TensorInfo, _FourBits]:
    """Return the description of the dequantised matrix, and the update that computes it."""
    with open_file(state.path) as file:
        file.seek(state.start)
        text = file.read(state.nbytes)
    where = f"{state.path}: tensor '{state.name}'"
    said: Any = parse_json(text, where=where, error=CheckpointError)

    def wrong(field: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{where}: field '{field}': expected {expected}, found {quote(said.get(field))}"
        )

    if not isinstance(said, dict):
        raise CheckpointError(f"{where}: expected an object, found {quote(said)}")
    if kind not in _KINDS or said.get("quant_type") != kind:
        raise wrong("quant_type", f"one of {', '.join(_KINDS)}, as in the name of the tensor")
    if said.get("dtype") not in _DTYPES:
        raise wrong("dtype", f"one of {', '.join(_DTYPES)}")
    shape, block = said.get("shape"), said.get("blocksize")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(one) is int and one > 0 for one in shape)
    ):
        raise wrong("shape", "two sizes")
    if type(block) is not int or block < 1:
        raise wrong("blocksize", "a whole number above 0")
    is_nested, outer, offset = f"{name}.nested_absmax" in tensors, 0, 0.0
    if is_nested:
        outer, offset = said.get("nested_blocksize"), said.get("nested_offset")
        if type(outer) is not int or outer < 1:
            raise wrong("nested_blocksize", "a whole number above 0")
        if not isinstance(offset, float | int) or not math.isfinite(offset):
            raise wrong("nested_offset", "a finite number")

    def part(suffix: str, dtype: str, sizes: tuple[int, ...]) -> TensorInfo:
        tensor = tensors.get(f"{name}{suffix}")
        if tensor is None or tensor.dtype != dtype or tensor.shape != sizes:
            found = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(
                f"{state.path}: tensor '{name}{suffix}': expected {dtype} {list(sizes)} by its state, found {found}"
            )
        return tensor

    count = shape[0] * shape[1]
    blocks = -(-count // block)
    packed = part("", "U8", (-(-count // 2), 1))
    matrix = TensorInfo(**{**vars(packed), "shape": tuple(shape)})
    nested = None
    if is_nested:
        scales = part(".nested_absmax", "F32", (-(-blocks // outer),))
        values = part(".nested_quant_map", "F32", (_SCALE_PLACES,))
        nested = _Nested(scales, values, outer, float(offset))
    return matrix, _FourBits(
        packed=packed,
        scales=part(".absmax", "U8" if is_nested else "F32", (blocks,)),
        values=part(".quant_map", "F32", (_PLACES,)),
        block=block,
        dtype=said["dtype"],
        nested=nested,
    )


@dataclass(frozen=True)
class _Nested:
    """Quantised scales with their own scales."""

    scales: TensorInfo  # float32, one per block of scales
    values: TensorInfo  # float32 [256]
    block: int  # scales per block
    offset: float


@dataclass(frozen=True, kw_only=True)
class _FourBits:
    """A matrix with four bits per number."""

    packed: TensorInfo  # uint8 [ceil(O * I / 2), 1]
    scales: TensorInfo  # one per block of numbers: float32, or uint8 with further scales
    values: TensorInfo  # float32 [16]
    block: int  # numbers per block
    dtype: str  # dtype of bitsandbytes' dequantised matrix
    nested: _Nested | None

    def __call__(
        self, reader: SliceReader, out: np.ndarray, tensor: TensorInfo, region: tuple[slice, ...]
    ) -> None:
        width = tensor.shape[1]
        (first_row, last_row, _), (first, last, _) = (
            part.indices(size) for part, size in zip(region, tensor.shape, strict=True)
        )
        start, stop = (
            first_row * width,
            last_row * width,
        )  # whole rows, because blocks may end within rows
        if out.size == 0:
            return
        packed = np.empty((-(-stop // 2) - start // 2, 1), np.uint8)
        reader.read(packed, self.packed, (slice(start // 2, -(-stop // 2)), slice(0, 1)))
        places = np.stack([packed[:, 0] >> 4, packed[:, 0] & 15], axis=1).reshape(-1)
        places = places[start % 2 : start % 2 + stop - start]
        blocks = slice(start // self.block, -(-stop // self.block))
        scales = np.repeat(self._scales(reader, blocks), self.block)
        skipped = start - blocks.start * self.block
        numbers = _read(reader, self.values)[places] * scales[skipped : skipped + stop - start]
        numbers = numbers.astype(FLOAT_DTYPES[_DTYPES[self.dtype]])
        out[...] = numbers.reshape(-1, width)[:, first:last].astype(out.dtype)

    def _scales(self, reader: SliceReader, blocks: slice) -> np.ndarray:
        """Return the scales of some blocks, float32."""
        if self.nested is None:
            return _read(reader, self.scales, blocks)
        outer = slice(blocks.start // self.nested.block, -(-blocks.stop // self.nested.block))
        scales = _read(reader, self.nested.scales, outer)
        of_block = np.arange(blocks.start, blocks.stop) // self.nested.block - outer.start
        numbers = np.empty(blocks.stop - blocks.start, np.uint8)
        reader.read(numbers, self.scales, (blocks,))
        return _read(reader, self.nested.values)[numbers] * scales[of_block] + np.float32(self.nested.offset)


def _read(reader: SliceReader, tensor: TensorInfo, part: slice | None = None) -> np.ndarray:
    """Return the values of a vector, or of a part of it, float32."""
    part = part or slice(0, tensor.shape[0])
    values = np.empty(part.stop - part.start, np.float32)
    reader.read(values, tensor, (part,))
    return values
