"""Training of shared arrays together with parameters of each seen person, on random choices of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from prb_jax.personal.few_shot.choices import Array, Choices, Responses
from prb_jax.personal.few_shot.fitting import train
from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers


@dataclass(frozen=True, kw_only=True)
class JointSettings(FewShotSettings):
    """Settings of joint training and of adapting a new person by gradient.

    Attributes:
      steps: updates, of which the validation part chooses: more of them fit the seen people's noise.
      batch: choices in an update.
      rate: learning rate of Adam at the start of a cosine schedule.
      pull: penalties that pull a new person's parameters to the start, of which the validation part chooses one.
      adapt_steps: updates of a new person's parameters.
      adapt_rate: their learning rate.
    """

    steps: tuple[int, ...] = (400, 800)
    batch: int = 512
    rate: float = 3e-3
    pull: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    adapt_steps: int = 100
    adapt_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        above = {"rate": 0, "pull": 0, "adapt_rate": 0}
        check_numbers(self, above=above, least={"steps": 1, "batch": 1, "adapt_steps": 1})


PairLoss = Callable[[Any, Responses, Array, Any], jax.Array]
"""``(params, pairs, users, settings)`` -> the loss; pairs [b, 2] chosen and rejected, users int32 [b] of
`Choices.person`."""


def fit_joint(
    loss: PairLoss,
    start: Any,
    seen: Choices,
    *,
    settings: JointSettings,
    steps: int,
    key: jax.Array,
) -> Any:
    """Return the parameters after so many steps, numpy arrays of the host.

    Args:
      loss: of a batch of choices; one function object for every call, so that it is compiled once.
      start: parameters.
      seen: the people to train on.
      settings: of the training.
      steps: one of those of the settings.
      key: of the batches.
    """
    rows = (np.stack([seen.chosen, seen.rejected], axis=1), seen.person)
    found = _train(start, seen.table, *rows, key, loss=loss, settings=settings, steps=steps)
    return jax.tree.map(np.asarray, found)


@partial(jax.jit, static_argnames=("loss", "settings", "steps"))
def _train(
    start: Any,
    table: Responses,
    pairs: Array,
    users: Array,
    key: jax.Array,
    *,
    loss: PairLoss,
    settings: JointSettings,
    steps: int,
) -> Any:
    def of_batch(params: Any, key: jax.Array, progress: Array) -> jax.Array:
        drawn = jax.random.randint(key, (settings.batch,), 0, len(users))
        return loss(params, table.take(pairs[drawn]), users[drawn], settings)

    return train(of_batch, start, steps=steps, rate=settings.rate, key=key)
