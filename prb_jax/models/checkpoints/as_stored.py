"""Checkpoints of other tools: wrappers in tensor names, and FP8 or four-bit matrices with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.four_bits import four_bits
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES, TensorInfo
from prb_jax.models.checkpoints.weight_index import SCALE, SliceReader, Update, WeightIndex
from prb_jax.records.reading import read_object

# Wrappers of torch.compile and of DistributedDataParallel.
_WRAPPERS = ("_orig_mod.", "module.")
_SAVED, _ORIGINAL = (
    ".modules_to_save.default.",
    ".original_module.",
)  # PEFT's wrapper of a fully trained module
_BLOCK = (128, 128)  # block size of DeepSeek-V3, the default if config.json has none


def as_stored(index: WeightIndex) -> WeightIndex:
    """Return the index with plain names; quantised matrices are multiplied by their scales during reading.

    Raises:
      CheckpointError: Two tensors have the same name, or scales do not fit their matrix.
    """
    tensors, told = dict(index.tensors), list[str]()
    while tensors and (prefix := _prefix(tensors)):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        told.append(f"all names begin with '{prefix}', which is left out")
    if any(_SAVED in name for name in tensors):
        trained = {name: tensor for name, tensor in tensors.items() if _ORIGINAL not in name}
        tensors = {name.replace(_SAVED, "."): tensor for name, tensor in trained.items()}
        if len(tensors) < len(trained):
            raise CheckpointError(
                f"{index.folder}: a tensor occurs twice, with and without '{_SAVED.strip('.')}'"
            )
        told.append(f"modules of PEFT are read from '{_SAVED.strip('.')}', not from 'original_module'")
    tensors = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    scales = {name.removesuffix(SCALE): tensor for name, tensor in tensors.items() if name.endswith(SCALE)}
    tensors, updates, dequantised = four_bits(tensors)
    told += dequantised
    if scales:
        block = _block(index.folder)
        updates |= {name: _scaled(tensors, name, scale, block) for name, scale in scales.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
        size = " x ".join(map(str, block))
        told.append(f"{len(scales)} matrices of FP8 are multiplied by their scales of blocks of {size}")
    return replace(index, tensors=tensors, updates=updates, told=tuple(told))


def _prefix(names: Mapping[str, object]) -> str | None:
    """Return the wrapper around the whole model, a prefix of all names."""
    wrappers = [*_WRAPPERS, *(["model."] if any(name.startswith("model.model.") for name in names) else [])]
    return next((one for one in wrappers if all(name.startswith(one) for name in names)), None)


def _block(folder: Path) -> tuple[int, int]:
    """Return the rows and columns of a block from `quantization_config`."""
    described = read_object(folder / "config.json", error=CheckpointError, finite=False).get(
        "quantization_config"
    )
    size = (
        described.get("weight_block_size", list(_BLOCK)) if isinstance(described, Mapping) else list(_BLOCK)
    )
    if not isinstance(size, list) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        raise CheckpointError(
            f"{folder / 'config.json'}: field 'quantization_config.weight_block_size': expected two sizes, found "
            f"{quote(size)}"
        )
    return size[0], size[1]


def _scaled(
    tensors: Mapping[str, TensorInfo], name: str, scale: TensorInfo, block: tuple[int, int]
) -> Update:
    matrix = tensors.get(name)
    if matrix is None or matrix.dtype != "F8_E4M3" or len(matrix.shape) != 2:
        raise CheckpointError(
            f"{scale.path}: tensor '{scale.name}': expected a matrix '{name}' of F8_E4M3 beside it"
        )
    expected = tuple(-(-size // of_block) for size, of_block in zip(matrix.shape, block, strict=True))
    if scale.shape != expected:
        raise CheckpointError(
            f"{scale.path}: tensor '{scale.name}': expected shape {list(expected)}, found {list(scale.shape)}"
        )
    if scale.dtype not in FLOAT_DTYPES:  # bytes may be exponents of 2
        raise CheckpointError(
            f"{scale.path}: tensor '{scale.name}': expected floating-point scales, found {scale.dtype}"
        )
    return _Scaled(scale, block)


@dataclass(frozen=True)
class _Scaled:
    """A matrix times its scales, one scale per block of rows and columns."""

    scale: TensorInfo
    block: tuple[int, int]

    def __call__(
        self, reader: SliceReader, out: np.ndarray, tensor: TensorInfo, region: tuple[slice, ...]
    ) -> None:
        bounds = [part.indices(size)[:2] for part, size in zip(region, tensor.shape, strict=True)]
        values = np.empty([stop - start for start, stop in bounds], np.float32)
        reader.read(values, tensor, region)
        blocks = tuple(
            slice(start // size, -(-stop // size))
            for (start, stop), size in zip(bounds, self.block, strict=True)
        )
        scales = np.empty([part.stop - part.start for part in blocks], np.float32)
        reader.read(scales, self.scale, blocks)
        for axis, ((start, stop), size) in enumerate(zip(bounds, self.block, strict=True)):
            scales = np.take(scales, np.arange(start, stop) // size - start // size, axis=axis)
        out[...] = (values * scales).astype(out.dtype)
