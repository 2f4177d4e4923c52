"""Soft prompts of the users of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from prb_jax.errors import DataError, RunError
from prb_jax.personal.method import OfUser, Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.reading import read_json
from prb_jax.records.writing import write_json
from prb_jax.training.config import TrainSettings
from prb_jax.training.weights import learning_rate

USERS = "users.json"  # in the run folder: user ids in row order
_TIMES_FASTER = 10.0


def soft_prompts_of_run(
    settings: TrainSettings,
    comparisons: Sequence[OfUser],
    *,
    out: Path,
    width: int,
    lengths: Sequence[int],
    mesh: Mesh,
) -> SoftPrompts:
    """Return the soft prompts of the users of a run with a model of this width.

    Its users come from the training data and are stored in the run folder `out`. Without data, they are read from that
    folder.

    Raises:
      DataError: No comparison has a user.
      RunError: The folder cannot be written, or contains no list of users.
    """
    options, optimizer = settings.user_embedding, settings.optimizer_of(hidden_size=width)
    assert optimizer.learning_rate is not None
    given = options.learning_rate
    peak = _TIMES_FASTER * optimizer.learning_rate if given is None else given
    return SoftPrompts(
        table=_kept_users(comparisons, out / USERS),
        tokens=options.tokens,
        width=width,
        places=settings.batch.comparisons,
        generic_share=options.generic_share,
        seed=settings.seed,
        optimizer=RowAdam(
            learning_rate=learning_rate(dataclasses.replace(optimizer, learning_rate=peak), lengths=lengths),
            b1=optimizer.b1,
            b2=optimizer.b2,
            eps=optimizer.eps,
            clip_norm=optimizer.clip_norm,
        ),
        mesh=mesh,
    )


def _kept_users(comparisons: Sequence[OfUser], path: Path) -> Users:
    if not comparisons:
        names = read_json(path, error=RunError)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RunError(f"{path}: expected a list of user ids")
        return Users(tuple(names))
    users = Users.of(comparisons)
    if not users.names:
        raise DataError("method=persona_embedding: no comparison of the training data has a user_id")
    on_first_process(lambda: write_json(path, users.names))
    return users
