"""Named arrays in a folder of Orbax: written whole, restored as they were or onto the devices of any mesh.

Checksums are sums of the bits, so that they are the same on any mesh, and tell a damaged folder from a good one.
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
    """Write arrays in place of what the folder held; every device writes its own part.

    Args:
      folder: made if it is missing.
      arrays: of the host or of devices, by name; without any, nothing is written.

    Returns:
      what :func:`read_arrays` needs to know: shape, dtype and checksum of each, JSON-ready.

    Raises:
      RunError: it cannot be written (a full disk).
    """
    if not arrays:
        return {}
    import orbax.checkpoint as ocp  # it takes long to import

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
    """Read what :func:`write_arrays` wrote.

    Args:
      folder: of the arrays.
      described: what it returned.
      shardings: of each array on devices, each of which then reads its own part; numpy arrays if not given.

    Raises:
      RunError: the folder is missing or damaged, or holds other arrays.
    """
    if not described:
        return {}
    import orbax.checkpoint as ocp

    quiet_orbax()
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; expected the arrays that lie beside its description")
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
        raise RunError(f"{folder}: damaged: {', '.join(wrong[:3])} is not what was saved")
    return dict(restored)


def bytes_on_disk(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def flat_arrays(tree: Any) -> dict[str, Any]:
    """Return every array of a pytree by its place, as in "trainable/layers/q": plain names, whatever the containers."""
    return {_place(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def from_flat(template: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the reverse of `flat_arrays`: a pytree built as `template`, with these arrays."""
    return jax.tree.map_with_path(lambda path, _: arrays[_place(path)], template)


def _place(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """For each array the sum of its words of 32 bits, modulo 2^32; the same for every sharding."""
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
    """Keep what Orbax logs of every file from the user; its failures are raised by us."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_a_failed_write)
    if sys.unraisablehook is not _without_closed_loops:
        _hooks.append(sys.unraisablehook)
        sys.unraisablehook = _without_closed_loops


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs every file, and every failure several times over."""
    return "/orbax/" not in record.pathname.replace("\\", "/")


_hooks: list[Callable[[Any], Any]] = []
"""What handled exceptions in callbacks before :func:`_without_closed_loops`."""


def _without_closed_loops(unraisable: Any) -> None:
    """Drops what Orbax leaves behind when one of several writes fails: the others find its event loop closed.

    The failure itself is raised by Orbax and reported by us; these would only bury it under tracebacks.
    """
    error = unraisable.exc_value
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return
    _hooks[-1](unraisable)


def _not_of_a_failed_write(record: logging.LogRecord) -> bool:
    """When several writes of one checkpoint fail, only the first is awaited, and raised by Orbax."""
    error = record.exc_info[1] if record.exc_info else None
    return "was never retrieved" not in record.getMessage() or "OCDBT" not in str(error)


def reason_of(error: BaseException) -> str:
    """What went wrong, in a line; a full disk by its name, however deep it lies."""
    cause: BaseException | None = error
    while cause is not None:
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(cause) or "RESOURCE_EXHAUSTED" in str(cause):
            return "no space left on the device"
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
