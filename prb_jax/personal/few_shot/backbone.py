"""What a method that trains the backbone needs of it: low-rank adapters of parts of the comparisons, and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import numpy as np

from prb_jax.personal.few_shot.settings import FewShotSettings, check_numbers

TRAINS: Final = "backbone"
"""The need of a method that trains the backbone: the name of the field of `Choices`."""

Adapter = Any
"""The trained part of a backbone, a tree of float32 arrays of the host: low-rank factors and the score head."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(FewShotSettings):
    """Settings of every method that trains adapters of the backbone.

    Attributes:
      rank: inner size of the update of each matrix.
      alpha: an update is multiplied by alpha / rank.
      steps: updates of the adapter of everybody.
      own_steps: updates of the adapter of a group of people, which starts as that of everybody.
      batch: comparisons in a step.
      rate: learning rate at its peak; 0 for that of `prb train`, which goes by the width of the model.
      sharpness: factors of the log-likelihood of a person's comparisons, of which the validation part chooses one:
        below 1 where adapters are surer than they are right.
    """

    rank: int = 8
    alpha: float = 16.0
    steps: int = 200
    own_steps: int = 100
    batch: int = 16
    rate: float = 0.0
    sharpness: tuple[float, ...] = (0.1, 0.3, 1.0)

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"rank": 1, "steps": 1, "own_steps": 1, "batch": 1, "rate": 0}
        check_numbers(self, above={"alpha": 0, "sharpness": 0}, least=least)


class AdapterTrainer(Protocol):
    """Trains adapters on parts of the same comparisons."""

    def __call__(self, members: np.ndarray, start: Adapter | None = None) -> Adapter:
        """Return the adapter after the trainer's number of steps.

        Args:
          members: int [m], places of comparisons.
          start: where it starts; None for the backbone as it is.
        """
        ...


class Backbone(Protocol):
    """A model that can be trained, and the responses that R rows of features stand for."""

    def trainer(
        self, pairs: np.ndarray, *, settings: AdapterSettings, steps: int, seed: int
    ) -> AdapterTrainer:
        """Return a trainer for comparisons.

        Args:
          pairs: int [n, 2], the rows of the chosen and of the rejected response.
          settings: of the adapters.
          steps: updates of each training.
          seed: of the factors and of the order of the comparisons.
        """
        ...

    def rewards(self, adapters: Sequence[Adapter], *, settings: AdapterSettings) -> np.ndarray:
        """Return the reward of every response under each of C adapters, float32 [R, C]."""
        ...


def unstacked(adapters: Adapter) -> list[Adapter]:
    """Return each of C adapters, from one tree whose arrays have the leading axis C."""
    count = len(jax.tree.leaves(adapters)[0])
    return [jax.tree.map(lambda leaf, number=number: leaf[number], adapters) for number in range(count)]
