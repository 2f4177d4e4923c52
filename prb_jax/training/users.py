"""The method of personalisation of a training run, from its settings and its data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, RunError
from prb_jax.personal.embedding import RowAdam
from prb_jax.personal.method import NULL, Method
from prb_jax.personal.soft_prompts import SoftPrompts
from prb_jax.personal.users import Users
from prb_jax.processes.sharing import on_first_process
from prb_jax.training.optimizer import OptimizerConfig, learning_rate
from prb_jax.training.settings import TrainSettings

USERS = "users.json"
"""In the run folder: whose row is which."""

_TIMES_FASTER = 10.0


def method_of_run(
    settings: TrainSettings,
    comparisons: Sequence[Comparison],
    *,
    out: Path,
    width: int,
    optimizer: OptimizerConfig,
    mesh: Mesh,
) -> Method:
    """Return the method that a run trains. The users that it knows are kept in the folder of the run.

    Args:
      settings: of the run.
      comparisons: the training data; without any, the users are those that the folder names.
      out: the run folder.
      width: D of the model.
      optimizer: of the model's own weights.
      mesh: devices.

    Raises:
      DataError: no comparison has a user.
      RunError: the folder cannot be written, or names no users.
    """
    if settings.method != "persona_embedding":
        return NULL
    options = settings.user_embedding
    peak = options.learning_rate or _TIMES_FASTER * optimizer.learning_rate
    return SoftPrompts(
        table=_kept_users(comparisons, out / USERS),
        tokens=options.tokens,
        width=width,
        places=settings.batch.comparisons,
        generic_share=options.generic_share,
        seed=settings.seed,
        optimizer=RowAdam(
            learning_rate=learning_rate(dataclasses.replace(optimizer, learning_rate=peak)),
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            clip_norm=optimizer.clip_norm,
        ),
        mesh=mesh,
    )


def _kept_users(comparisons: Sequence[Comparison], path: Path) -> Users:
    if not comparisons:
        try:
            return Users(tuple(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{path}: cannot be read as a list of users: {error}") from error
    users = Users.of(comparisons)
    if not users.names:
        raise DataError("method=persona_embedding: no comparison of the training data has a user_id")

    def keep() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(list(users.names), ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror or error}") from error

    on_first_process(keep)
    return users
