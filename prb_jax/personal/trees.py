"""Trees of arrays in folders of Orbax, and what a JSON file beside them says of their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from prb_jax.checkpoints.array_folder import flat_arrays, read_arrays, write_arrays
from prb_jax.errors import RunError, quote


def write_tree(folder: Path, tree: Any) -> dict[str, Any]:
    """Write a tree of nested dicts and lists of arrays.

    Returns:
      what `read_tree` needs to know, JSON-ready: "tree", the names of the arrays in their places; "arrays", the shape,
      dtype and checksum of each; "digest", of all of them.

    Raises:
      RunError: it cannot be written.
    """
    flat = flat_arrays(tree)
    names = jax.tree.unflatten(jax.tree.structure(tree), list(flat))
    return {"tree": names, "arrays": write_arrays(folder, flat), "digest": _digest(flat)}


def read_tree(
    folder: Path,
    facts: Mapping[str, Any],
    *,
    sharding: Callable[[tuple[int, ...]], NamedSharding] | None = None,
) -> Any:
    """Read what `write_tree` wrote.

    Args:
      folder: of the arrays.
      facts: with what it returned.
      sharding: of an array of this shape on devices; numpy arrays if not given.

    Raises:
      RunError: it is missing, damaged, or not what the facts say.
    """
    try:
        described = facts["arrays"]
        shardings = None
        if sharding is not None:
            shardings = {name: sharding(tuple(one["shape"])) for name, one in described.items()}
        found = read_arrays(folder, described, shardings=shardings)
        return jax.tree.map(lambda name: found[name], facts["tree"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder}: is not described by the file beside it: {error}") from error


def check_format(facts: Mapping[str, Any], kind: str, form: int, *, where: Path) -> None:
    """Refuse a description of another kind of folder or of another format.

    Raises:
      RunError: naming the file and both.
    """
    for field, expected in (("kind", kind), ("format", form)):
        if (found := facts.get(field)) != expected:
            raise RunError(f"{where}: {field}: expected {quote(expected)}, found {quote(found)}")


def _digest(arrays: Mapping[str, Any]) -> str:
    found = sha256()
    for name, leaf in sorted(arrays.items()):
        held = np.asarray(leaf)
        found.update(f"{name} {held.dtype} {held.shape}\n".encode())
        found.update(np.ascontiguousarray(held).tobytes())
    return f"sha256:{found.hexdigest()}"
