"""A table of users, a soft prompt in each row, trained row by row (after P-RLHF, arXiv 2402.05133).

Row 0 is the generic user, for everybody who is not in the table; row i + 1 belongs to user i. One step
touches M rows at most, the users of its comparisons, however many the table holds: they are gathered
once, the loss is differentiated by them alone, and only they and their moments are written back. So
the gradient that devices exchange is [M, S, D], never [U + 1, S, D].

Letters: U users, S tokens of a soft prompt, D model width, M rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prb_jax.errors import MeshError
from prb_jax.personal.method import StepRows
from prb_jax.personal.users import GENERIC
from prb_jax.sharding import RULES, shown_axes

SAVED = ("table", "mu", "nu", "count")
"""The entries of the state that outlive a step; the others are set at the start of each."""


def step_rows(rows: np.ndarray, *, size: int, count: int | None = None) -> StepRows:
    """The distinct rows among ``rows``, filled up to a fixed number so that steps compile once.

    Args:
      rows: int [n], the row of each comparison of the step.
      size: rows of the table.
      count: M; n if not given, which is always enough.

    Raises:
      ValueError: more distinct users than ``count``.
    """
    distinct, slots = np.unique(rows, return_inverse=True)
    count = len(rows) if count is None else count
    if len(distinct) > count:
        raise ValueError(f"{len(distinct)} distinct users do not fit {count} rows")
    ids = np.full(count, size, np.int32)
    ids[: len(distinct)] = distinct
    return StepRows(ids, slots.reshape(-1).astype(np.int32))


def generic_instead(rows: np.ndarray, *, share: float, seed: int, step: int) -> np.ndarray:
    """``rows`` with a random share of them replaced by the generic user, who so learns what all have in
    common. Which ones is a function of (seed, step) alone."""
    # The order of the data takes its streams from the low end of the second number.
    key = np.array([seed, 2**63 + step], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    return np.where(generator.random(len(rows)) < share, GENERIC, rows).astype(np.int32)


def init_table(embedding: Any, *, users: int, tokens: int, seed: int = 0) -> jax.Array:
    """A new table float32 [U + 1, S, D]: everybody starts as the generic user, at the scale of the words.

    A pure function: under ``jax.jit`` with output shardings nothing large is made in one place.

    Args:
      embedding: [V, D] of the model; only its mean and deviation are used.
      users: U.
      tokens: S.
      seed: of the generic user.
    """
    words = jnp.asarray(embedding, jnp.float32)
    noise = jax.random.normal(jax.random.key(seed), (tokens, words.shape[1]), jnp.float32)
    generic = words.mean(axis=0) + words.std() * noise
    return jnp.broadcast_to(generic, (users + 1, *generic.shape))


def table_sharding(mesh: Mesh, *, width: int) -> NamedSharding:
    """Of the table, its moments and the rows of a step: split by D as the words' embeddings are.

    Every device then holds a part of every user, and gathers and writes rows without asking another.

    Raises:
      MeshError: the mesh axis does not divide the width.
    """
    axes = RULES["model"] or ()
    parts = int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))
    if width % parts:
        raise MeshError(
            f"user embeddings: width {width} is not divisible by mesh axis {shown_axes(mesh, axes)}"
        )
    return NamedSharding(mesh, PartitionSpec(None, None, axes))


def state_shardings(mesh: Mesh, *, width: int) -> dict[str, NamedSharding]:
    """One for each entry of the state that :func:`init_state` makes."""
    rows, whole = table_sharding(mesh, width=width), NamedSharding(mesh, PartitionSpec())
    return {"table": rows, "mu": rows, "nu": rows, "rows": rows, "count": whole, "ids": whole}


def init_state(table: jax.Array, *, rows: int) -> dict[str, jax.Array]:
    """The state of a table in training. A pure function; its shardings are :func:`state_shardings`.

    Args:
      table: float32 [U + 1, S, D].
      rows: M.

    Returns:
      ``table``, its moments ``mu`` and ``nu``, ``count`` int32 [U + 1] of each row's updates, and what
      one step works on: ``ids`` int32 [M] and ``rows`` [M, S, D].
    """
    size, tokens, width = table.shape
    return {
        "table": table,
        "mu": jnp.zeros_like(table),
        "nu": jnp.zeros_like(table),
        "count": jnp.zeros((size,), jnp.int32),
        "ids": jnp.full((rows,), size, jnp.int32),
        "rows": jnp.zeros((rows, tokens, width), jnp.float32),
    }


def gather_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows [M, S, D] of a table [U + 1, S, D]; ids beyond it give the last row, which is not used."""
    return jnp.take(table, ids, axis=0, mode="clip")


@dataclass(frozen=True, kw_only=True)
class RowAdam:
    """Adam on the rows of a step, each with moments and a count of its own ("lazy" Adam).

    A row that no step touches keeps value and moments as they are; rows that every step touches move as
    under ``optax.adam``.

    Attributes:
      learning_rate: as a function of the number of updates that the run has made.
      b1, b2, eps: of Adam.
      clip_norm: gradients of all rows together with a larger norm are scaled down to it; None for no
        clipping.
    """

    learning_rate: optax.Schedule
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float | None = None

    def apply_rows(
        self, users: Mapping[str, jax.Array], gradient: jax.Array, step: jax.Array
    ) -> dict[str, jax.Array]:
        """One update of the rows ``users["ids"]``.

        Args:
          users: as of :func:`init_state`; ids are distinct, but for those beyond the table, which are
            dropped.
          gradient: [M, S, D].
          step: updates made so far.
        """
        if self.clip_norm is not None:
            norm = optax.tree.norm(gradient)
            gradient = gradient * (self.clip_norm / jnp.maximum(norm, self.clip_norm))
        ids = users["ids"]
        mu = self.b1 * gather_rows(users["mu"], ids) + (1.0 - self.b1) * gradient
        nu = self.b2 * gather_rows(users["nu"], ids) + (1.0 - self.b2) * jnp.square(gradient)
        count = jnp.take(users["count"], ids, mode="clip") + 1
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
