"""What a fitted method knows of many people, in a folder: names, and a tree of arrays with an axis of people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from prb_jax.checkpoints.array_folder import bytes_on_disk
from prb_jax.data.reading import read_object
from prb_jax.data.writing import write_json, writing
from prb_jax.errors import DataError, RunError, quote, short_repr
from prb_jax.personal.folder import STATES
from prb_jax.personal.trees import check_format, read_tree, write_tree
from prb_jax.sharding import batch_sharding, mesh_shape, replicated

ARRAYS: Final = "arrays"
KIND: Final = "prb_jax states"
FORMAT: Final = 1


@dataclass(frozen=True)
class UserStates:
    """The states of U people.

    Attributes:
      users: their names, in the order of the rows.
      states: a tree whose arrays have the leading axis U.
      digest: of the arrays, where they were read.
      rows: the row of each person.
    """

    users: tuple[str, ...]
    states: Any
    digest: str | None = None
    rows: Mapping[str, int] = field(init=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        rows = {user: row for row, user in enumerate(self.users)}
        if len(rows) < len(self.users):
            twice = next(user for row, user in enumerate(self.users) if rows[user] != row)
            raise DataError(f"states: user {quote(twice)} is given twice")
        for leaf in jax.tree.leaves(self.states):
            if len(leaf) != len(self.users):
                raise DataError(f"states: expected {len(self.users)} rows, found {len(leaf)}")
        object.__setattr__(self, "rows", rows)

    def of(self, users: Sequence[str]) -> Any:
        """Return the states of some of the users, each array with a leading axis of them."""
        rows = np.array([self.rows[user] for user in users], np.int64)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], self.states)


def save_states(folder: str | Path, found: UserStates, *, method: str, fitted: str) -> int:
    """Write the states of people as a folder of Orbax; arrays on devices are written part by part.

    Args:
      folder: made where there is none; what it held is replaced.
      found: the people and their states.
      method: its name.
      fitted: digest of the fitted method (``personalised.json``): to any other one these states mean nothing.

    Returns:
      the bytes on the disk.

    Raises:
      RunError: it cannot be written.
    """
    path = Path(folder)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        (path / STATES).unlink(missing_ok=True)
    facts = {"kind": KIND, "format": FORMAT, "method": method, "fitted": fitted, "users": list(found.users)}
    write_json(path / STATES, facts | write_tree(path / ARRAYS, found.states), indent=0)
    return bytes_on_disk(path)


def read_states(
    folder: str | Path, *, method: str, fitted: str | None = None, mesh: Mesh | None = None
) -> UserStates:
    """Read the states of people.

    Args:
      folder: of :func:`save_states`.
      method: that they must be of.
      fitted: digest of the fitted method that they must be of; None for any of this name.
      mesh: devices over which the people are split, where their number can be; numpy arrays if not given.

    Raises:
      RunError: there are none, they are of another method or of another fit of it, or a file is damaged.
    """
    path = Path(folder)
    facts = read_object(path / STATES, error=RunError)
    check_format(facts, KIND, FORMAT, where=path / STATES)
    for name, expected in (("method", method), ("fitted", fitted)):
        if expected is not None and facts.get(name) != expected:
            raise RunError(
                f"{path / STATES}: {name}: expected {quote(expected)}, found {quote(facts.get(name))}: these are "
                f"states of another {'method' if name == 'method' else f'fit of {method}'}"
            )

    def split(shape: tuple[int, ...]) -> NamedSharding:
        assert mesh is not None
        even = shape[0] % mesh_shape(mesh).batch_shards == 0
        return batch_sharding(mesh, len(shape)) if even else replicated(mesh)

    states = read_tree(path / ARRAYS, facts, sharding=None if mesh is None else split)
    return UserStates(tuple(facts["users"]), states, facts["digest"])
