"""The method of personalisation of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from prb_jax.personal.method import NULL, OfUser, TrainedMethod
from prb_jax.seams import get
from prb_jax.training.config import TrainSettings

USERS = "users.json"  # in the run folder: user ids in row order


def method_of_run(
    settings: TrainSettings,
    comparisons: Sequence[OfUser],
    *,
    out: Path,
    width: int,
    lengths: Sequence[int],
    mesh: Mesh,
) -> TrainedMethod:
    """Return the method of personalisation for a run with a model of this width.

    Its users come from the training data and are stored in the run folder `out`. Without data, they are read from that
    folder.

    Raises:
      DataError: No comparison has a user.
      RunError: The folder cannot be written, or contains no list of users.
    """
    if settings.method != "persona_embedding":
        return NULL
    given = {"out": out, "width": width, "lengths": lengths, "mesh": mesh}
    return get("training", "soft prompts").value(settings, comparisons, **given)
