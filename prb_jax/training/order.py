"""Which comparisons each step of a training run sees.

Which ones they are is arithmetic: the data is read as an endless stream, epoch after epoch, each in a random order of
its own that depends on (seed, epoch) alone. So a run on another mesh or with another number of processes sees the same
comparisons in the same steps, and a run that is continued needs to know nothing but the number of its step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prb_jax.errors import DataError
from prb_jax.personal.method import OfUser

_OPEN = 16
"""Steps that still take users while further ones are filled."""


class StepOrder(Protocol):
    """The order of the data."""

    @property
    def count(self) -> int:
        """Comparisons in the data."""
        ...

    @property
    def per_step(self) -> int:
        """Comparisons in a step, at most."""
        ...

    def step(self, step: int) -> np.ndarray:
        """int64 [at most per_step]: indices of the comparisons of one step (from 0)."""
        ...

    def seen(self, step: int) -> int:
        """Comparisons in all steps before this one."""
        ...

    def epoch_of(self, step: int) -> float:
        """How many times the data has been seen before this step."""
        ...


@dataclass(frozen=True)
class Order:
    """Single comparisons: step s takes the positions [s * B, (s + 1) * B) of the stream.

    Attributes:
      count: comparisons in the data.
      per_step: B, comparisons in a step.
      seed: of the order.
    """

    count: int
    per_step: int
    seed: int

    def seen(self, step: int) -> int:
        return step * self.per_step

    def epoch_of(self, step: int) -> float:
        return self.seen(step) / self.count

    def step(self, step: int) -> np.ndarray:
        positions = np.arange(step * self.per_step, (step + 1) * self.per_step)
        epochs = positions // self.count
        members = np.empty(self.per_step, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            members[chosen] = permutation(self.count, self.seed, int(epoch))[positions[chosen] % self.count]
        return members


class UserOrder:
    """Whole users: a step takes all comparisons of some users who have not had their turn in this epoch.

    Users come in a random order, each into the first step with room. A user with more comparisons than a step has room
    for is split into parts of about equal size, which take their turns like users.

    Args:
      comparisons: of the data; one without a user is a user of its own.
      per_step: most comparisons in a step.
      seed: of the order.

    Attributes:
      split: how many users are split.

    Raises:
      DataError: no comparison has a user.
    """

    def __init__(self, comparisons: Sequence[OfUser], *, per_step: int, seed: int) -> None:
        self.count, self.per_step, self.seed = len(comparisons), per_step, seed
        by_user: dict[str | int, list[int]] = {}
        for place in range(len(comparisons)):
            user = comparisons[place].user_id
            by_user.setdefault(place if user is None else user, []).append(place)
        if not any(isinstance(user, str) for user in by_user):
            raise DataError("batch_by=user: no comparison of the training data has a user_id")
        self.split = sum(len(members) > per_step for members in by_user.values())
        self._parts = [
            part
            for members in by_user.values()
            for part in np.array_split(np.asarray(members, np.int64), -(-len(members) // per_step))
        ]
        self._starts = [0]  # the first step of each epoch
        self._epochs: dict[int, list[np.ndarray]] = {}  # the newest two
        self._lock = threading.Lock()

    def step(self, step: int) -> np.ndarray:
        epoch, within = self._find(step)
        return epoch[1][within]

    def seen(self, step: int) -> int:
        (number, steps), within = self._find(step)
        return number * self.count + sum(len(members) for members in steps[:within])

    def epoch_of(self, step: int) -> float:
        return self.seen(step) / self.count

    def _find(self, step: int) -> tuple[tuple[int, list[np.ndarray]], int]:
        """The number and the steps of the epoch of a step, and its place there."""
        with self._lock:
            while self._starts[-1] <= step:
                self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
            number = int(np.searchsorted(self._starts, step, side="right")) - 1
            return (number, self._epoch(number)), step - self._starts[number]

    def _epoch(self, number: int) -> list[np.ndarray]:
        """The comparisons of each step of one epoch."""
        if number not in self._epochs:
            self._epochs = {key: value for key, value in self._epochs.items() if key == number - 1}
            steps: list[list[np.ndarray]] = []
            room: list[int] = []
            for place in permutation(len(self._parts), self.seed, number).tolist():
                part = self._parts[place]
                first = max(0, len(steps) - _OPEN)
                at = next((at for at in range(first, len(steps)) if room[at] >= len(part)), len(steps))
                if at == len(steps):
                    steps.append([])
                    room.append(self.per_step)
                steps[at].append(part)
                room[at] -= len(part)
            self._epochs[number] = [np.concatenate(parts) for parts in steps]
        return self._epochs[number]


@functools.lru_cache(maxsize=2)  # a step touches one epoch, or the end of one and the start of the next
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [count]: the order of one epoch, a pure function of the arguments."""
    # Philox by counter: defined for all platforms and versions, and epochs are independent streams.
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return np.argsort(generator.random(count), kind="stable")
