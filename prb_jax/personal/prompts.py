"""Soft prompts of users at scoring time: their files, and their use in a loaded model.

A scorer accepts only token ids. The soft prompts therefore become extra rows of the model's embedding, and a
comparison's tree starts with the ids of its user's rows. Any scorer of trees then scores them for
their users without further arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from prb_jax.errors import CheckpointError, quote
from prb_jax.personal import SOFT_PROMPTS, has_soft_prompts
from prb_jax.personal.method import OfUser, Users, with_prefixes
from prb_jax.records.reading import read_object
from prb_jax.trees.tree import Tree

TABLE, NAMES = SOFT_PROMPTS
_TENSOR = "soft_prompts"


@dataclass(frozen=True)
class UserPrompts:
    """The leading token ids of trees, for a model with user embeddings."""

    users: Users  # users with their own soft prompts
    tokens: int  # S
    first_id: int  # id of the generic user's first vector; the vectors of row r start r * S later

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """Return the trees, each starting with the soft prompt of its comparison's user."""
        starts = self.first_id + self.tokens * self.users.rows(comparisons)
        prompts = np.asarray(starts[:, None] + np.arange(self.tokens), np.int32)
        return with_prefixes(trees, prompts)

    def unknown(self, comparisons: Iterable[OfUser]) -> set[str]:
        """Return the users of the comparisons who get the generic prompt."""
        return self.users.unknown(comparisons)


def save_prompts(folder: str | Path, users: Users, table: np.ndarray) -> None:
    """Write ``users.safetensors`` (float32 [U + 1, S, D], the generic user first) and ``users.json``.

    Raises:
      OSError: If the folder cannot be written.
      ValueError: If the table has another number of users.
    """
    from safetensors.numpy import save_file

    if len(table) != users.size:
        raise ValueError(f"a table of {len(table)} rows for {users.size - 1} users and the generic one")
    path = Path(folder)
    save_file({_TENSOR: np.ascontiguousarray(table, np.float32)}, path / TABLE)
    names = {"tokens": int(table.shape[1]), "users": list(users.names)}
    (path / NAMES).write_text(json.dumps(names, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class SavedPrompts:
    """The contents of the files of :func:`save_prompts`: the users, and their table, float32 [U + 1, S, D]."""

    users: Users
    table: np.ndarray

    def prompts(self, *, first_id: int) -> UserPrompts:
        """Return the leading ids of trees, if the table's rows have the ids from `first_id` on."""
        return UserPrompts(self.users, tokens=self.table.shape[1], first_id=first_id)

    def extend(self, embedding: jax.Array, *, sharding: NamedSharding) -> jax.Array:
        """Return the embedding [V, D] followed by the table as rows, in the embedding's dtype.

        Rows of zeros pad the result to a number of rows that the mesh divides.
        """
        axes = sharding.spec[0] if sharding.spec else None
        names = () if axes is None else (axes,) if isinstance(axes, str) else axes
        parts = int(np.prod([sharding.mesh.shape[name] for name in names], dtype=np.int64))
        rows = self.table.reshape(-1, self.table.shape[-1])
        padding = -(embedding.shape[0] + len(rows)) % parts

        def extend(embedding: jax.Array, rows: jax.Array) -> jax.Array:
            filler = jnp.zeros((padding, rows.shape[1]), embedding.dtype)
            return jnp.concatenate([embedding, rows.astype(embedding.dtype), filler])

        return jax.jit(extend, out_shardings=sharding)(embedding, np.asarray(rows, np.float32))


def load_prompts(folder: str | Path, *, width: int) -> SavedPrompts | None:
    """Load the soft prompts in the folder of a model; None if the folder has none.

    Args:
      folder: Folder of the model.
      width: Width D of the model.

    Raises:
      CheckpointError: If one of the two files is missing or damaged, or does not fit the other file or the model.
    """
    path = Path(folder)
    if not has_soft_prompts(path):
        return None
    for name, other in ((TABLE, NAMES), (NAMES, TABLE)):
        if not (path / name).is_file():
            raise CheckpointError(f"{path}: has {other} but no {name}: the users' soft prompts need both")
    content = read_object(path / NAMES, error=CheckpointError)
    names, tokens = content.get("users"), content.get("tokens")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path / NAMES}: field 'users': expected a list of user ids")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise CheckpointError(
            f"{path / NAMES}: field 'tokens': expected a positive whole number, found {quote(tokens)}"
        )
    table, expected = _read_table(path / TABLE), (len(names) + 1, tokens, width)
    if table.shape != expected:
        raise CheckpointError(
            f"{path / TABLE}: tensor '{_TENSOR}': expected shape {list(expected)} (the generic user, the "
            f"{len(names)} users and {tokens} tokens of {NAMES}, the model's width), found {list(table.shape)}"
        )
    if len(set(names)) < len(names):
        raise CheckpointError(f"{path / NAMES}: field 'users': a user is named twice")
    return SavedPrompts(Users(tuple(names)), table)


def _read_table(path: Path) -> np.ndarray:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
    if set(tensors) != {_TENSOR}:
        raise CheckpointError(f"{path}: expected one tensor '{_TENSOR}', found {sorted(tensors) or 'none'}")
    table = tensors[_TENSOR]
    if table.dtype != np.float32 or table.ndim != 3:
        raise CheckpointError(
            f"{path}: tensor '{_TENSOR}': expected float32 [users + 1, tokens, width], found "
            f"{table.dtype} {list(table.shape)}"
        )
    return table
