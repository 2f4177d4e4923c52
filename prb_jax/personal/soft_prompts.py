"""Soft prompts of users, trained row by row: ``persona_embedding`` (after P-RLHF, arXiv 2402.05133).

Row 0 of the table is the generic user, for everybody who is not in it; row i + 1 belongs to user i. One step touches
at most M rows, the users of its comparisons, for any size of the table. It gathers these rows once, differentiates the
loss only by them, and writes back only them and their moments. The gradient that devices exchange is therefore
[M, S, D], never [U + 1, S, D].

Letters: U users, S tokens of a soft prompt, D model width, M rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prb_jax.errors import MeshError
from prb_jax.personal.method import (
    GENERIC,
    MethodState,
    OfUser,
    StepRows,
    TrainedMethod,
    Users,
    with_prefixes,
)
from prb_jax.personal.prompts import save_prompts
from prb_jax.platform.sharding import RULES, replicated, shown_axes
from prb_jax.trees.tree import Tree

SAVED = ("table", "mu", "nu", "count")
"""The entries of the state that outlive a step; the others are set at the start of each."""


@dataclass(frozen=True, kw_only=True)
class SoftPrompts(TrainedMethod):
    """A table of users on a mesh, of which each step trains the rows of its own users."""

    table: Users  # users of the rows
    tokens: int  # S, the length of a soft prompt
    width: int  # D
    places: int  # M, the rows of a step; one row per comparison is always enough
    # share of the comparisons of a step that train the generic user instead of their own
    generic_share: float
    seed: int  # for the table and for that share
    optimizer: RowAdam  # of the rows
    mesh: Mesh  # devices

    @property
    def users(self) -> tuple[str, ...]:
        return self.table.names

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """Shardings of the state: the table, its moments and the rows of a step are split by D, like word embeddings.
        Every device holds a part of every user, and gathers and writes rows without communication.

        Raises:
          MeshError: If the mesh axis does not divide the width.
        """
        axes = RULES["model"] or ()
        if self.width % int(np.prod([self.mesh.shape[axis] for axis in axes], dtype=np.int64)):
            raise MeshError(
                f"user embeddings: width {self.width} is not divisible by mesh axis {shown_axes(self.mesh, axes)}"
            )
        rows, whole = (NamedSharding(self.mesh, PartitionSpec(*spec)) for spec in ((None, None, axes), ()))
        return {"table": rows, "mu": rows, "nu": rows, "rows": rows, "count": whole, "ids": whole}

    def encode(self, trees: Sequence[Tree], comparisons: Sequence[OfUser]) -> list[Tree]:
        """Return trees that start with room for a soft prompt; the ids there are the number of the user's row."""
        return with_prefixes(trees, [np.full(self.tokens, row, np.int32) for row in self.rows(comparisons)])

    def start(self, embedding: jax.Array) -> MethodState:
        """Return a new state. In ``table`` [U + 1, S, D] all users start as the generic user, at the scale of the word
        embeddings. ``mu`` and ``nu`` are its moments, ``count`` int32 [U + 1] the updates of each row. One step works
        on ``ids`` int32 [M] and ``rows`` [M, S, D].

        The function is pure: under ``jax.jit`` with output shardings, no device holds a large array whole.
        """
        words = jnp.asarray(embedding, jnp.float32)
        noise = jax.random.normal(jax.random.key(self.seed), (self.tokens, words.shape[1]), jnp.float32)
        generic = words.mean(axis=0) + words.std() * noise
        table = jnp.broadcast_to(generic, (self.table.size, *generic.shape))
        moments = {name: jnp.zeros_like(table) for name in ("mu", "nu")}
        return {"table": table, **moments, "count": jnp.zeros((len(table),), jnp.int32), **self._of_step()}

    def _of_step(self) -> MethodState:
        rows = jnp.zeros((self.places, self.tokens, self.width), jnp.float32)
        return {"ids": jnp.full((self.places,), self.table.size, jnp.int32), "rows": rows}

    def rows(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        return self.table.rows(comparisons)

    def rows_of_step(self, rows: np.ndarray, members: np.ndarray, *, step: int) -> StepRows:
        """Return the distinct rows of a step, padded to ``places`` to compile steps only once.

        A random share of the comparisons trains the generic user instead of their own. The generic user thus learns
        the preferences that all users share. The choice depends only on (seed, step).
        """
        # The order of the data uses the low values of the second key number.
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, 2**63 + step], np.uint64)))
        generic = generator.random(len(members)) < self.generic_share
        # A comparison that occurs twice in a step (small data sets) must get one row.
        _, first, again = np.unique(members, return_index=True, return_inverse=True)
        drawn = np.where(generic, GENERIC, rows[members])[first][again.reshape(-1)]
        distinct, slots = np.unique(drawn, return_inverse=True)
        ids = np.full(self.places, self.table.size, np.int32)
        ids[: len(distinct)] = distinct
        return StepRows(ids, slots.reshape(-1).astype(np.int32))

    def take(self, state: MethodState, ids: jax.Array) -> MethodState:
        return {**state, "rows": _gather(state["table"], ids), "ids": ids}

    def inputs(self, state: MethodState) -> jax.Array:
        return state["rows"]

    def soft_prompts(self, inputs: jax.Array) -> jax.Array:
        return inputs

    def update(
        self, state: MethodState, gradient: jax.Array, *, step: jax.Array, learn: jax.Array
    ) -> MethodState:
        """Return the state after one update of the step's rows. If ``learn`` is False, no row is written."""
        # Rows beyond the table are dropped by scatters.
        ids = jnp.where(learn, state["ids"], state["table"].shape[0])
        return {**self.optimizer.apply_rows({**state, "ids": ids}, gradient, step), "ids": state["ids"]}

    def for_everyone(self, state: MethodState) -> MethodState:
        return {**state, "rows": state["table"]}

    def kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {name: state[name] for name in SAVED}

    def resume(self, kept: Mapping[str, jax.Array]) -> MethodState:
        shardings = {name: self.shardings[name] for name in ("ids", "rows")}
        return {**jax.jit(self._of_step, out_shardings=shardings)(), **kept}

    def host_table(self, state: MethodState) -> np.ndarray:
        """Return the table, float32 [U + 1, S, D], the generic user first."""
        table = jax.jit(lambda leaf: leaf, out_shardings=replicated(self.mesh))(state["table"])
        return np.asarray(table.addressable_data(0))

    def save(self, folder: Path, table: np.ndarray) -> None:
        save_prompts(folder, self.table, table)


def _gather(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows [M, ...] of a table [U + 1, ...]; ids beyond the table give the last row, which is unused."""
    return jnp.take(table, ids, axis=0, mode="clip")


@dataclass(frozen=True, kw_only=True)
class RowAdam:
    """Adam on the rows of a step, with separate moments and counts per row ("lazy" Adam).

    A row that no step touches keeps its value and moments; rows that every step touches move as
    with ``optax.adam``.
    """

    learning_rate: optax.Schedule  # function of the number of updates so far in the run
    b1: float = 0.9  # of Adam
    b2: float = 0.999  # of Adam
    eps: float = 1e-8  # of Adam
    # maximum norm of the gradient of all rows together; larger gradients are scaled down. None for no clipping
    clip_norm: float | None = None

    def apply_rows(self, users: Mapping[str, jax.Array], gradient: jax.Array, step: jax.Array) -> MethodState:
        """Update the rows ``users["ids"]`` of a state by their gradient [M, S, D], after ``step`` updates. Ids within
        the table must be distinct; ids beyond the table are dropped."""
        if self.clip_norm is not None:
            norm = optax.tree.norm(gradient)
            gradient = gradient * (self.clip_norm / jnp.maximum(norm, self.clip_norm))
        ids = users["ids"]
        mu = self.b1 * _gather(users["mu"], ids) + (1.0 - self.b1) * gradient
        nu = self.b2 * _gather(users["nu"], ids) + (1.0 - self.b2) * jnp.square(gradient)
        count = _gather(users["count"], ids) + 1
        age = count.astype(jnp.float32)[:, None, None]
        direction = (mu / (1.0 - self.b1**age)) / (jnp.sqrt(nu / (1.0 - self.b2**age)) + self.eps)
        rate = jnp.asarray(self.learning_rate(step), jnp.float32)
        return {
            **users,
            "table": users["table"].at[ids].add(-rate * direction, mode="drop"),
            "mu": users["mu"].at[ids].set(mu, mode="drop"),
            "nu": users["nu"].at[ids].set(nu, mode="drop"),
            "count": users["count"].at[ids].set(count, mode="drop"),
        }
