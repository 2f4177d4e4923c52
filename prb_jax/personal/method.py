"""What a method of personalisation adds to a model in training, and the users that it knows.

A method says what a model learns of single users beside its weights: what stands for the user in a tree, which
parameters of the users a step trains, and how they are kept. In training it is one more group of parameters, so the
loop knows no method by name.

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
    """A comparison, or a part of it that says whose it is."""

    @property
    def user_id(self) -> str | None:
        """The user, if one is known."""
        ...


def with_prefixes(trees: Sequence[Tree], prefixes: Iterable[np.ndarray]) -> list[Tree]:
    """Return the trees with further ids, int32 [S], in front of each."""
    pairs = zip(trees, prefixes, strict=True)
    return [replace(tree, prefix=np.concatenate([ids, tree.prefix])) for tree, ids in pairs]


GENERIC = 0  # the row of everybody who is not in the table


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
        """The users of these comparisons, sorted, so that the order of the data does not matter."""
        return cls(tuple(sorted({c.user_id for c in comparisons if c.user_id is not None})))

    @property
    def size(self) -> int:
        """Rows of the table, U + 1."""
        return len(self.names) + 1

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        """int32 [n]: the row of each comparison's user; the generic one for no user or an unknown one."""
        users = (c.user_id for c in comparisons)
        return np.array(
            [GENERIC if user is None else self._rows.get(user, GENERIC) for user in users], np.int32
        )

    def unknown(self, comparisons: Iterable[OfUser]) -> set[str]:
        """The users of these comparisons who are not in the table."""
        return {c.user_id for c in comparisons if c.user_id is not None and c.user_id not in self._rows}


MethodState = dict[str, jax.Array]  # the arrays of a method in training


@dataclass(frozen=True)
class StepRows:
    """The users of one step."""

    # int32 [M], their distinct rows in the table; filled up with numbers beyond the table, which nothing is
    # written to. Empty where a step trains nothing of users
    ids: np.ndarray
    slots: np.ndarray  # int32 [n], for each comparison of the step its place in ``ids``


class UserTokens(Protocol):
    """Tokens that stand for the user in front of a tree."""

    @property
    def tokens(self) -> int:
        """The positions that they take in front of every prefix."""
        ...

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """Return the trees as the model sees them, with the tokens of their comparison's user in front."""
        ...

    def unknown(self, comparisons: Iterable[OfUser]) -> set[str] | None:
        """Return the users of the comparisons for whom generic tokens stand; None if that is not known."""
        ...


class TrainedMethod:
    """A method of personalisation in training. What one does not define is as of a method without users.

    Functions of a state are pure: they are called inside ``jax.jit``.
    """

    tokens: int  # the positions that stand for the user in front of every prefix

    @property
    def users(self) -> tuple[str, ...]:
        """The ids of the users it has parameters for."""
        return ()

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """One sharding for each entry of the state."""
        return {}

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """The trees as the model sees them, with the tokens of their comparison's user in front."""
        return list(trees)

    def unknown(self, comparisons: Iterable[OfUser]) -> set[str] | None:
        """The users that are not trained; None in training, which counts them otherwise."""
        return None

    def start(self, embedding: jax.Array) -> MethodState:
        """A new state, from the model's embedding [V, D]."""
        return {}

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        """int32 [n]: the row of each comparison's user."""
        return np.zeros(len(comparisons), np.int32)

    def rows_of_step(self, rows: np.ndarray, members: np.ndarray, *, step: int) -> StepRows:
        """The rows that one step trains, and for each of its comparisons which of them.

        Args:
          rows: int32 [n], of all comparisons of the data.
          members: int [B], those of the step.
          step: its number, from 0.
        """
        return StepRows(np.zeros(0, np.int32), np.zeros(len(members), np.int32))

    def take(self, state: MethodState, ids: jax.Array) -> MethodState:
        """The state with the rows ``ids`` int32 [M] as those of the step."""
        return state

    def inputs(self, state: MethodState) -> Any:
        """What the loss is differentiated by."""
        return {}

    def soft_prompts(self, inputs: Any) -> jax.Array | None:
        """float [M, S, D], of the rows of the step; None for a method without soft prompts."""
        return None

    def update(self, state: MethodState, gradient: Any, *, step: jax.Array, learn: jax.Array) -> MethodState:
        """The state after one update; as it was where ``learn`` (bool []) is False."""
        return state

    def for_everyone(self, state: MethodState) -> MethodState:
        """For scoring in training: a state whose rows are those of all users."""
        return state

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of the state that a checkpoint holds."""
        return {}

    def resume(self, kept: Mapping[str, jax.Array]) -> MethodState:
        """The whole state again."""
        return {}

    def host_table(self, state: MethodState) -> np.ndarray:
        """What is exported, float32 on the host. Every process must ask for it."""
        return np.zeros(0, np.float32)

    def save(self, folder: Path, table: np.ndarray) -> None:
        """Write the exported table beside the model's files."""


class NullMethod(TrainedMethod):
    """Nothing is learned of single users: the prompt alone may tell of them (user-blind, profile in context)."""

    tokens = 0


NULL = NullMethod()
