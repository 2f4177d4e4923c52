"""Named arrays in an Orbax folder, restored on the host or onto the devices of any mesh.

Checksums are sums of bits: equal on any mesh, and sufficient to detect a damaged folder.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from prb_jax.errors import RunError


def write_arrays(folder: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the contents of a folder with arrays; every device writes its part.

    Args:
      folder: Folder; created if missing.
      arrays: Host or device arrays by name; if empty, nothing is written.

    Returns:
      Description for :func:`read_arrays`: shape, dtype and checksum of each array, JSON-ready.

    Raises:
      RunError: The folder cannot be written, e.g. because the disk is full.
    """
    if not arrays:
        return {}
    import orbax.checkpoint as ocp  # imported here because the import is slow

    quiet_orbax()
    leaves = {
        name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for name, leaf in arrays.items()
    }
    sums = checksums(leaves)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as saver:
            saver.save(folder.absolute(), args=ocp.args.StandardSave(leaves), force=True)  # pyright: ignore[reportCallIssue]
    except Exception as error:
        raise RunError(f"cannot write {folder}: {reason_of(error)}") from error
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": sums[name]}
        for name, leaf in leaves.items()
    }


def read_arrays(
    folder: Path, described: Mapping[str, Any], *, shardings: Mapping[str, NamedSharding] | None = None
) -> dict[str, Any]:
    """Read arrays that :func:`write_arrays` wrote.

    Args:
      folder: Folder of the arrays.
      described: Return value of :func:`write_arrays`.
      shardings: Sharding of each array on devices, where every device reads its part; without it, numpy arrays.

    Raises:
      RunError: The folder is missing or damaged, or contains other arrays.
    """
    if not described:
        return {}
    import orbax.checkpoint as ocp

    quiet_orbax()
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; expected the arrays beside their description")
    try:
        target = {
            name: jax.ShapeDtypeStruct(
                tuple(one["shape"]),
                jnp.dtype(one["dtype"]),
                sharding=None if shardings is None else shardings[name],
            )
            for name, one in described.items()
        }
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            restored = reader.restore(folder.absolute(), args=ocp.args.StandardRestore(target))  # pyright: ignore[reportCallIssue]
    except Exception as error:
        raise RunError(f"{folder}: cannot be read: {reason_of(error)}") from error
    sums = checksums(restored)
    if wrong := [name for name, one in described.items() if sums.get(name) != one["checksum"]]:
        raise RunError(f"{folder}: damaged: {', '.join(wrong[:3])} differs from what was saved")
    return dict(restored)


def bytes_on_disk(folder: Path) -> int:
    """Return the total size of a folder's files in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def flat_arrays(tree: Any) -> dict[str, Any]:
    """Return every array of a pytree by path, e.g. "trainable/layers/q", independent of container types."""
    return {_place(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def from_flat(template: Any, arrays: Mapping[str, Any]) -> Any:
    """Invert `flat_arrays`: return a pytree structured like `template` with these arrays."""
    return jax.tree.map_with_path(lambda path, _: arrays[_place(path)], template)


def _place(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Return the sum of each array's 32-bit words, modulo 2^32; equal for every sharding."""
    sums = _bit_sums(dict(arrays))
    return {name: int(np.asarray(value)) for name, value in sums.items()}


@jax.jit
def _bit_sums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _bit_sum(array) for name, array in arrays.items()}


def _bit_sum(array: jax.Array) -> jax.Array:
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(array, words)
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def quiet_orbax() -> None:
    """Hide Orbax's log messages about files; we raise its failures as errors."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_a_failed_write)
    if sys.unraisablehook is not _without_closed_loops:
        _hooks.append(sys.unraisablehook)
        sys.unraisablehook = _without_closed_loops


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Return False for messages of Orbax, which logs every file, and every failure several times."""
    return "/orbax/" not in record.pathname.replace("\\", "/")


_hooks: list[Callable[[Any], Any]] = []
"""Handler of unraisable exceptions before :func:`_without_closed_loops`."""


def _without_closed_loops(unraisable: Any) -> None:
    """Drop follow-up exceptions of Orbax: after one of several writes fails, the others find a closed event loop.

    Orbax raises the failure and we report it; the follow-up tracebacks would only hide it.
    """
    error = unraisable.exc_value
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return
    _hooks[-1](unraisable)


def _not_of_a_failed_write(record: logging.LogRecord) -> bool:
    """Drop further failures of one checkpoint: Orbax awaits and raises only the first."""
    error = record.exc_info[1] if record.exc_info else None
    return "was never retrieved" not in record.getMessage() or "OCDBT" not in str(error)


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in one line; detect a full disk anywhere in the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(cause) or "RESOURCE_EXHAUSTED" in str(cause):
            return "no space left on the device"
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
