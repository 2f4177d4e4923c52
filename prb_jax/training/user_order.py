"""The order of training data by whole users."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from prb_jax.errors import DataError
from prb_jax.personal.method import OfUser
from prb_jax.training.data import Order, permutation

_OPEN = 16


class UserOrder(Order):
    """Order by whole users: a step takes all comparisons of some users not yet used in this epoch.

    Users are drawn in random order, each into the first step with room. A user with more comparisons than fit into a
    step is split into parts of about equal size, and each part is treated as a user.

    Args:
      comparisons: Comparisons of the data; one without a user counts as a separate user.
      per_step: Maximum number of comparisons per step.
      seed: Seed of the order.

    Attributes:
      split: Number of users that are split.

    Raises:
      DataError: No comparison has a user.
    """

    def __init__(self, comparisons: Sequence[OfUser], *, per_step: int, seed: int) -> None:
        super().__init__(len(comparisons), per_step, seed)
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
        _, steps, within = self._find(step)
        return steps[within]

    def seen(self, step: int) -> int:
        number, steps, within = self._find(step)
        return number * self.count + sum(map(len, steps[:within]))

    def _find(self, step: int) -> tuple[int, list[np.ndarray], int]:
        """Return the epoch of a step, all steps of this epoch, and the index of the step among them."""
        with self._lock:
            while self._starts[-1] <= step:
                self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
            number = int(np.searchsorted(self._starts, step, side="right")) - 1
            return number, self._epoch(number), step - self._starts[number]

    def _epoch(self, number: int) -> list[np.ndarray]:
        """Return the comparisons of each step of one epoch."""
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
