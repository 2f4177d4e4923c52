"""What is shown of a training run on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from prb_jax.runs.progress import Count

MEAN_STEPS = 20
"""Loss, accuracy and margin jump from step to step: means over so many are shown."""


@dataclass
class Board(Count):
    """The last numbers beside the steps."""

    unit: str = "steps"
    _last: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, step: int, row: Mapping[str, float]) -> None:
        """Take over one row of metrics."""
        self.done = step
        for name, value in row.items():
            kept = MEAN_STEPS if name in ("loss", "accuracy", "margin") else 1
            self._last.setdefault(name, deque(maxlen=kept)).append(value)

    def parts(self) -> list[str]:
        """Return the count, the means of the last steps, the last validation, and speeds."""
        shown = {name: sum(values) / len(values) for name, values in self._last.items()}
        forms = {
            "loss": ".3f",
            "accuracy": ".2f",
            "margin": ".2f",
            "validation_loss": ".3f",
            "validation_accuracy": ".2f",
        }
        means = [
            f"{name.replace('_', ' ')} {shown[name]:{form}}" for name, form in forms.items() if name in shown
        ]
        mfu = [f"MFU {shown['mfu']:.0%}"] if shown.get("mfu") else []
        return [*self.head(), *means, *self.speeds("pairs", "tokens"), *mfu]
