"""Methods of personalisation in training: their parameters and their users.

A method defines what a model learns about individual users besides its weights: the tokens that represent the user in
a tree, the user parameters that a step trains, and how they are saved. In training a method is one more group of
parameters, so the training loop does not depend on any specific method.

Letters: U users, S tokens of a soft prompt, D model width, M rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from prb_jax.errors import DataError, quote
from prb_jax.trees.tree import Tree


class OfUser(Protocol):
    """A comparison, or a part of one that names its user."""

    @property
    def user_id(self) -> str | None:
        """The user, or None if unknown."""
        ...


def with_prefixes(trees: Sequence[Tree], prefixes: Iterable[np.ndarray]) -> list[Tree]:
    """Return the trees with further ids, int32 [S], in front of each."""
    pairs = zip(trees, prefixes, strict=True)
    return [replace(tree, prefix=np.concatenate([ids, tree.prefix])) for tree, ids in pairs]


GENERIC = 0  # row of all users who are not in the table


@dataclass(frozen=True)
class Users:
    """The users of a table, in the order of its rows."""

    names: tuple[str, ...]  # distinct user ids; ``names[i]`` has row i + 1
    _rows: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = {name: row for row, name in enumerate(self.names, start=1)}
        if len(rows) < len(self.names):
            double = next(name for row, name in enumerate(self.names, start=1) if rows[name] != row)
            raise DataError(f"users: {quote(double)} is given twice; expected distinct user ids")
        object.__setattr__(self, "_rows", rows)

    @classmethod
    def of(cls, comparisons: Iterable[OfUser]) -> Users:
        """Return the users of these comparisons, sorted to be independent of the order of the data."""
        return cls(tuple(sorted({c.user_id for c in comparisons if c.user_id is not None})))

    @property
    def size(self) -> int:
        """Rows of the table, U + 1."""
        return len(self.names) + 1

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        """Return the row of each comparison's user, int32 [n]; the generic row for no user or an unknown one."""
        users = (c.user_id for c in comparisons)
        return np.array(
            [GENERIC if user is None else self._rows.get(user, GENERIC) for user in users], np.int32
        )

    def unknown(self, comparisons: Iterable[OfUser]) -> set[str]:
        """Return the users of these comparisons who are not in the table."""
        return {c.user_id for c in comparisons if c.user_id is not None and c.user_id not in self._rows}


MethodState = dict[str, jax.Array]  # the arrays of a method in training


@dataclass(frozen=True)
class StepRows:
    """The users of one step."""

    # int32 [M], distinct rows of the users in the table, padded with numbers beyond the table (never written).
    # Empty if a step trains no user parameters
    ids: np.ndarray
    slots: np.ndarray  # int32 [n], index in ``ids`` of each comparison of the step


class UserTokens(Protocol):
    """Tokens at the start of a tree that represent the user."""

    @property
    def tokens(self) -> int:
        """Number of positions that the tokens take before every prefix."""
        ...

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """Return the trees in the form that the model reads, starting with the tokens of their users."""
        ...

    def unknown(self, comparisons: Iterable[OfUser]) -> set[str] | None:
        """Return the users of the comparisons who get generic tokens; None if unknown."""
        ...


class TrainedMethod:
    """A method of personalisation in training. The defaults describe a method without users.

    Functions that take a state must be pure, because they run inside ``jax.jit``.
    """

    tokens: int  # number of positions that represent the user before every prefix

    @property
    def users(self) -> tuple[str, ...]:
        """Ids of the users that have parameters."""
        return ()

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """Sharding of each entry of the state."""
        return {}

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """Return the trees in the form that the model reads, starting with the tokens of their users."""
        return list(trees)

    def unknown(self, comparisons: Iterable[OfUser]) -> set[str] | None:
        """Return the untrained users; None in training, which counts them in another way."""
        return None

    def start(self, embedding: jax.Array) -> MethodState:
        """Return a new state, from the model's embedding [V, D]."""
        return {}

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        """Return the row of each comparison's user, int32 [n]."""
        return np.zeros(len(comparisons), np.int32)

    def rows_of_step(self, rows: np.ndarray, members: np.ndarray, *, step: int) -> StepRows:
        """Return the rows that one step trains, and the row of each of its comparisons.

        Args:
          rows: Row of every comparison of the data, int32 [n].
          members: Indices of the step's comparisons, int [B].
          step: Number of the step, from 0.
        """
        return StepRows(np.zeros(0, np.int32), np.zeros(len(members), np.int32))

    def take(self, state: MethodState, ids: jax.Array) -> MethodState:
        """Return the state with the rows ``ids``, int32 [M], selected for the step."""
        return state

    def inputs(self, state: MethodState) -> Any:
        """Return the parameters for the gradient of the loss."""
        return {}

    def soft_prompts(self, inputs: Any) -> jax.Array | None:
        """Return the soft prompts of the step's rows, float [M, S, D]; None for a method without soft prompts."""
        return None

    def update(self, state: MethodState, gradient: Any, *, step: jax.Array, learn: jax.Array) -> MethodState:
        """Return the state after one update; unchanged if ``learn`` (bool []) is False."""
        return state

    def for_everyone(self, state: MethodState) -> MethodState:
        """Return a state whose rows cover all users, for scoring in training."""
        return state

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of the state that a checkpoint stores."""
        return {}

    def resume(self, kept: Mapping[str, jax.Array]) -> MethodState:
        """Return the whole state from the entries of a checkpoint."""
        return {}

    def host_table(self, state: MethodState) -> np.ndarray:
        """Return the table to export, float32 on the host. Every process must call this."""
        return np.zeros(0, np.float32)

    def save(self, folder: Path, table: np.ndarray) -> None:
        """Write the exported table next to the model's files."""


class NullMethod(TrainedMethod):
    """No user parameters: only the prompt may describe the user (user-blind, or with the profile in context)."""

    tokens = 0


NULL = NullMethod()
