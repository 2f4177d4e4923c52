"""User embeddings in a training run: which rows a step trains, and how a run keeps them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.data.comparison import Comparison
from prb_jax.data.reading import read_json
from prb_jax.errors import DataError, RunError
from prb_jax.personal.embedding import (
    SAVED,
    RowAdam,
    StepUsers,
    Users,
    generic_instead,
    init_state,
    init_table,
    state_shardings,
    step_users,
    user_rows,
)
from prb_jax.processes.sharing import on_first_process
from prb_jax.sharding import replicated
from prb_jax.training.optimizer import learning_rate
from prb_jax.training.settings import OptimizerSettings, TrainSettings
from prb_jax.training.step import TrainState, UserRows
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.tree import Tree

USERS = "users.json"
"""In the run folder: whose row is which."""

_TIMES_FASTER = 10.0


def find_users(settings: TrainSettings, comparisons: Sequence[Comparison], *, out: Path) -> Users | None:
    """The users that a run embeds, kept in its folder; None for methods that embed none.

    Args:
      settings: of the run.
      comparisons: the training data; without any, the users are those that the folder names.
      out: the run folder.

    Raises:
      DataError: no comparison has a user.
      RunError: the folder cannot be written, or names no users.
    """
    if settings.method != "persona_embedding":
        return None
    path = out / USERS
    if not comparisons:
        names = read_json(path, error=RunError)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RunError(f"{path}: expected a list of user ids")
        return Users(tuple(names))
    users = Users.of(comparisons)
    if not users.names:
        raise DataError("method=persona_embedding: no comparison of the training data has a user_id")

    def keep() -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(list(users.names), ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror or error}") from error

    on_first_process(keep)
    return users


@dataclasses.dataclass(frozen=True)
class UserTraining:
    """The table of a run: its shape, its optimiser, and the rows of each step.

    Attributes:
      users: whose row is which.
      settings: of the run.
      width: D.
      mesh: devices.
    """

    users: Users
    settings: TrainSettings
    width: int
    mesh: Mesh

    @property
    def tokens(self) -> int:
        """S, the length of a soft prompt."""
        return self.settings.user_embedding.tokens

    @property
    def places(self) -> int:
        """M, the rows of a step: one for each of its comparisons is always enough."""
        return self.settings.batch.comparisons

    def rows(self, optimizer: OptimizerSettings, *, lengths: Sequence[int]) -> UserRows:
        """How the table is trained; `optimizer` is that of the other weights, with its peak."""
        given = self.settings.user_embedding.learning_rate
        assert optimizer.learning_rate is not None
        peak = _TIMES_FASTER * optimizer.learning_rate if given is None else given
        adam = RowAdam(
            learning_rate=learning_rate(dataclasses.replace(optimizer, learning_rate=peak), lengths=lengths),
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            clip_norm=optimizer.clip_norm,
        )
        return user_rows(adam, mesh=self.mesh, width=self.width)

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the state."""
        table = jax.ShapeDtypeStruct((self.users.size, self.tokens, self.width), jnp.float32)
        return jax.eval_shape(lambda table: init_state(table, rows=self.places), table)

    def start(self, embedding: jax.Array) -> dict[str, jax.Array]:
        """A new state; everybody starts as the generic user."""

        def make(embedding: jax.Array) -> dict[str, jax.Array]:
            names, seed = self.users.names, self.settings.seed
            return init_state(
                init_table(embedding, users=len(names), tokens=self.tokens, seed=seed), rows=self.places
            )

        return jax.jit(make, out_shardings=state_shardings(self.mesh, width=self.width))(embedding)

    def resumed(self, saved: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The state with what was saved of it."""

        def make() -> dict[str, jax.Array]:
            abstract = self.abstract()
            return {
                name: jnp.zeros(leaf.shape, leaf.dtype)
                for name, leaf in abstract.items()
                if name not in SAVED
            }

        shardings = state_shardings(self.mesh, width=self.width)
        fresh = jax.jit(make, out_shardings={n: shardings[n] for n in shardings if n not in SAVED})()
        return {**fresh, **saved}

    def step(self, rows: np.ndarray, members: np.ndarray, step: int) -> StepUsers:
        """The rows that one step trains, and for each of its comparisons which of them.

        Args:
          rows: int32 [n], of all comparisons of the data.
          members: int [B], those of the step.
          step: its number, from 0.
        """
        options = self.settings.user_embedding
        drawn = generic_instead(
            rows[members], share=options.generic_share, seed=self.settings.seed, step=step
        )
        # A comparison that a small data set brings twice in a step has one row in it.
        _, first, again = np.unique(members, return_index=True, return_inverse=True)
        return step_users(drawn[first][again.reshape(-1)], size=self.users.size, count=self.places)

    def mark(self, trees: Sequence[Tree], comparisons: Sequence[Comparison]) -> list[Tree]:
        """Trees with room for a soft prompt in front; the ids there are the number of the user's row."""
        marked = []
        for tree, row in zip(trees, self.users.rows(comparisons), strict=True):
            room = np.full(self.tokens, row, np.int32)
            marked.append(dataclasses.replace(tree, prefix=np.concatenate([room, tree.prefix])))
        return marked

    def whole_table(self, state: TrainState, batch: TreeBatch) -> tuple[TrainState, np.ndarray]:
        """A state whose rows are the whole table, and for each marked tree of the batch its row there."""
        prefix, lengths = np.asarray(batch.prefix), np.asarray(batch.prefix_lengths)
        first = np.minimum(prefix.shape[1] - lengths, prefix.shape[1] - 1)
        found = np.where(lengths > 0, np.take_along_axis(prefix, first[:, None], axis=1)[:, 0], 0)
        table = state["users"]["table"]
        return {**state, "users": {**state["users"], "rows": table}}, found.astype(np.int32)

    def host_table(self, state: TrainState) -> np.ndarray:
        """float32 [U + 1, S, D] on the host; every process must ask for it."""
        table = jax.jit(lambda leaf: leaf, out_shardings=replicated(self.mesh))(state["users"]["table"])
        return np.asarray(table.addressable_data(0))


def saved_users(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of the table's state."""
    return {name: state["users"][name] for name in SAVED}
