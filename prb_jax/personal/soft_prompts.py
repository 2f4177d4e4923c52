"""A soft prompt for each user, trained row by row: ``persona_embedding`` (after P-RLHF, arXiv 2402.05133)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from prb_jax.personal.embedding import (
    SAVED,
    RowAdam,
    gather_rows,
    generic_instead,
    init_state,
    init_table,
    state_shardings,
    step_rows,
)
from prb_jax.personal.method import MethodState, StepRows
from prb_jax.personal.prompts import save_prompts
from prb_jax.personal.users import OfUser, Users
from prb_jax.sharding import replicated
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class SoftPrompts:
    """A table of users on a mesh, of which each step trains the rows of its own users.

    Attributes:
      table: whose row is which.
      tokens: S, the length of a soft prompt.
      width: D.
      places: M, the rows of a step: one for each of its comparisons is always enough.
      generic_share: share of the comparisons of a step that train the generic user instead of their own.
      seed: of the table and of that choice.
      optimizer: of the rows.
      mesh: devices.
    """

    table: Users
    tokens: int
    width: int
    places: int
    generic_share: float
    seed: int
    optimizer: RowAdam
    mesh: Mesh

    @property
    def users(self) -> tuple[str, ...]:
        return self.table.names

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        return state_shardings(self.mesh, width=self.width)

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """Trees with room for a soft prompt in front; the ids there are the number of the user's row."""
        marked = []
        for tree, row in zip(trees, self.rows(comparisons), strict=True):
            room = np.full(self.tokens, row, np.int32)
            marked.append(replace(tree, prefix=np.concatenate([room, tree.prefix])))
        return marked

    def start(self, embedding: jax.Array) -> MethodState:
        """A new state; everybody starts as the generic user."""
        table = init_table(embedding, users=len(self.users), tokens=self.tokens, seed=self.seed)
        return init_state(table, rows=self.places)

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        return self.table.rows(comparisons)

    def rows_of_step(self, rows: np.ndarray, members: np.ndarray, *, step: int) -> StepRows:
        drawn = generic_instead(rows[members], share=self.generic_share, seed=self.seed, step=step)
        # A comparison that a small data set brings twice in a step has one row in it.
        _, first, again = np.unique(members, return_index=True, return_inverse=True)
        return step_rows(drawn[first][again.reshape(-1)], size=self.table.size, count=self.places)

    def take(self, state: MethodState, ids: jax.Array) -> MethodState:
        return {**state, "rows": gather_rows(state["table"], ids), "ids": ids}

    def inputs(self, state: MethodState) -> jax.Array:
        return state["rows"]

    def soft_prompts(self, inputs: jax.Array) -> jax.Array:
        return inputs

    def update(
        self, state: MethodState, gradient: jax.Array, *, step: jax.Array, learn: jax.Array
    ) -> MethodState:
        """The rows of the step after one update. Where nothing is to be learned the table is not touched as a whole."""
        # Rows beyond the table are dropped by scatters.
        ids = jnp.where(learn, state["ids"], state["table"].shape[0])
        return {**self.optimizer.apply_rows({**state, "ids": ids}, gradient, step), "ids": state["ids"]}

    def for_everyone(self, state: MethodState) -> MethodState:
        return {**state, "rows": state["table"]}

    def rows_of(self, batch: TreeBatch) -> np.ndarray:
        prefix, lengths = np.asarray(batch.prefix), np.asarray(batch.prefix_lengths)
        first = np.minimum(prefix.shape[1] - lengths, prefix.shape[1] - 1)
        found = np.where(lengths > 0, np.take_along_axis(prefix, first[:, None], axis=1)[:, 0], 0)
        return found.astype(np.int32)

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {name: state[name] for name in SAVED}

    def resume(self, kept: Mapping[str, jax.Array]) -> MethodState:
        def others() -> MethodState:
            table = jnp.zeros((self.table.size, self.tokens, self.width), jnp.float32)
            return {
                name: leaf for name, leaf in init_state(table, rows=self.places).items() if name not in SAVED
            }

        shardings = {name: each for name, each in self.shardings.items() if name not in SAVED}
        return {**jax.jit(others, out_shardings=shardings)(), **kept}

    def host_table(self, state: MethodState) -> np.ndarray:
        """float32 [U + 1, S, D], the generic user first."""
        table = jax.jit(lambda leaf: leaf, out_shardings=replicated(self.mesh))(state["table"])
        return np.asarray(table.addressable_data(0))

    def save(self, folder: Path, table: np.ndarray) -> None:
        save_prompts(folder, self.table, table)
