"""What is shown of a run of `prb ppo` on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from prb_jax.runs.progress import Count
from prb_jax.training.progress import MEAN_STEPS

_FORMS = {
    "reward": ".3f",
    "accuracy": ".2f",
    "kl": ".3f",
    "entropy": ".2f",
    "clip_share": ".2f",
    "length": ".0f",
}


@dataclass
class RolloutBoard(Count):
    """The last numbers beside the steps: means over twenty of them."""

    unit: str = "steps"
    _last: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, step: int, row: Mapping[str, float]) -> None:
        """Take over one row of metrics."""
        self.done = step
        for name in _FORMS:
            if name in row:
                self._last.setdefault(name, deque(maxlen=MEAN_STEPS)).append(row[name])

    def parts(self) -> list[str]:
        """Return the count, the means of the last steps, and speeds."""
        means = [
            f"{name.replace('_', ' ')} {sum(values) / len(values):{_FORMS[name]}}"
            for name, values in self._last.items()
        ]
        return [*self.head(), *means, *self.speeds("tokens")]
