"""What every method of personalisation does, and the one that does nothing.

A method says what a model learns of single users beside its weights: what stands for the user in a tree, which
parameters of the users a step trains, and how they are kept. In training it is one more group of parameters
(:mod:`prb_jax.training.groups`), so the loop knows no method by name.

Letters: U users, S tokens of a soft prompt, D model width, M rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from prb_jax.personal.users import OfUser
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.tree import Tree

MethodState = dict[str, jax.Array]
"""The arrays of a method in training."""


@dataclass(frozen=True)
class StepRows:
    """The users of one step.

    Attributes:
      ids: int32 [M], their distinct rows in the table; filled up with numbers beyond the table, which
        nothing is written to. Empty where a step trains nothing of users.
      slots: int32 [n], for each comparison of the step its place in ``ids``.
    """

    ids: np.ndarray
    slots: np.ndarray


class UserTokens(Protocol):
    """Tokens that stand for the user in front of a tree."""

    @property
    def tokens(self) -> int:
        """The positions that they take in front of every prefix."""
        ...

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """Return the trees as the model sees them, with the tokens of their comparison's user in front."""
        ...


class Method(UserTokens, Protocol):
    """A method of personalisation, in training.

    Functions of a state are pure: they are called inside ``jax.jit``.
    """

    @property
    def users(self) -> tuple[str, ...]:
        """The ids of the users it has parameters for."""
        ...

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """One sharding for each entry of the state."""
        ...

    def start(self, embedding: jax.Array) -> MethodState:
        """A new state, from the model's embedding [V, D]."""
        ...

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        """int32 [n]: the row of each comparison's user."""
        ...

    def rows_of_step(self, rows: np.ndarray, members: np.ndarray, *, step: int) -> StepRows:
        """The rows that one step trains, and for each of its comparisons which of them.

        Args:
          rows: int32 [n], of all comparisons of the data.
          members: int [B], those of the step.
          step: its number, from 0.
        """
        ...

    def take(self, state: MethodState, ids: jax.Array) -> MethodState:
        """The state with the rows ``ids`` int32 [M] as those of the step."""
        ...

    def inputs(self, state: MethodState) -> Any:
        """What the loss is differentiated by."""
        ...

    def soft_prompts(self, inputs: Any) -> jax.Array | None:
        """float [M, S, D], of the rows of the step; None where there are none."""
        ...

    def update(self, state: MethodState, gradient: Any, *, step: jax.Array, learn: jax.Array) -> MethodState:
        """The state after one update; as it was where ``learn`` (bool []) is False."""
        ...

    def for_everyone(self, state: MethodState) -> MethodState:
        """For scoring in training: a state whose rows are those of all users."""
        ...

    def rows_of(self, batch: TreeBatch) -> np.ndarray:
        """int32 [B]: the row of all users that each encoded tree of a batch of the host belongs to."""
        ...

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of the state that a checkpoint holds."""
        ...

    def resume(self, kept: Mapping[str, jax.Array]) -> MethodState:
        """The whole state again."""
        ...

    def host_table(self, state: MethodState) -> np.ndarray:
        """What is exported, float32 on the host. Every process must ask for it."""
        ...

    def save(self, folder: Path, table: np.ndarray) -> None:
        """Writes the exported table beside the model's files."""
        ...


class NullMethod:
    """Nothing is learned of single users: the prompt alone may tell of them (user-blind, profile in context)."""

    tokens = 0
    users: tuple[str, ...] = ()

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        return {}

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        return list(trees)

    def start(self, embedding: jax.Array) -> MethodState:
        return {}

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        return np.zeros(len(comparisons), np.int32)

    def rows_of_step(self, rows: np.ndarray, members: np.ndarray, *, step: int) -> StepRows:
        return StepRows(np.zeros(0, np.int32), np.zeros(len(members), np.int32))

    def take(self, state: MethodState, ids: jax.Array) -> MethodState:
        return state

    def inputs(self, state: MethodState) -> Any:
        return {}

    def soft_prompts(self, inputs: Any) -> jax.Array | None:
        return None

    def update(self, state: MethodState, gradient: Any, *, step: jax.Array, learn: jax.Array) -> MethodState:
        return state

    def for_everyone(self, state: MethodState) -> MethodState:
        return state

    def rows_of(self, batch: TreeBatch) -> np.ndarray:
        return np.zeros(len(batch.prefix_lengths), np.int32)

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def resume(self, kept: Mapping[str, jax.Array]) -> MethodState:
        return {}

    def host_table(self, state: MethodState) -> np.ndarray:
        return np.zeros(0, np.float32)

    def save(self, folder: Path, table: np.ndarray) -> None:
        return None


NULL = NullMethod()
