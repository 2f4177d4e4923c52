"""Pairs as gates see them, and the figures of gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from prb_jax.building.settings import GateSettings
from prb_jax.errors import short_repr
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.paired import smallest_shift, tost
from prb_jax.metrics.uncertainty import difference_interval
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.clusters import clusters_of

LEAK_FOUND: Final = "leak found"
SOUND: Final = "sound"
CANNOT_TELL: Final = "cannot tell"
VERDICTS: Final = (LEAK_FOUND, SOUND, CANNOT_TELL)
"""Verdicts of gates with an interval: it excludes 0.5; the leak is surely within the margin; neither."""


@dataclass(frozen=True)
class Pair:
    """A built pair, the chosen answer first, with the aspects that it follows."""

    comparison: Comparison
    # reasons why the two answers end, from the replies of a language model
    finishes: tuple[str | None, str | None] = (None, None)
    provenance: Mapping[str, Any] = field(default_factory=dict)  # how the pair was made

    __repr__ = short_repr

    @property
    def id(self) -> str:
        """Id of the pair."""
        return self.comparison.id

    @property
    def chosen(self) -> str:
        """The answer that follows the aspects."""
        return self.comparison.responses[0]

    @property
    def rejected(self) -> str:
        """The answer that avoids the aspects."""
        return self.comparison.responses[1]


@dataclass(frozen=True)
class Leak:
    """Leak of a gate: how much more often than 0.5 a measure finds the chosen answer that it should not find."""

    margin: float  # if the leak is surely smaller, the benchmark is sound
    excluded: float  # larger leaks than this one are excluded (two one-sided tests at 0.05)
    # smallest leak that the gate finds at this size in 80 % of builds; None if it finds none
    detectable: float | None
    planted: str  # kind of leak that `detectable` measures, in words


@dataclass(frozen=True)
class GateFigure:
    """Figure of a gate over n pairs; its value is None if there is nothing to measure.

    A figure that must be 0.5 up to chance has an interval, and a `Leak`.
    """

    value: float | None
    n: int
    interval: tuple[float, float] | None = None
    passed: bool = True
    note: str = ""
    leak: Leak | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figure, JSON-ready."""
        return asdict(self) | {"interval": self.interval and list(self.interval)}


@dataclass(frozen=True)
class GateResult:
    """Result of one gate: its figures over the generator's first answers and over the pairs that are kept."""

    name: str
    definition: str
    before: GateFigure | None
    after: GateFigure
    dropped: int = 0  # pairs that this gate dropped
    relaxed: bool = False  # the gate may fail
    tried: bool = True  # its model or data were given

    @property
    def verdict(self) -> str:
        """Verdict in words: "passed", "failed" or "not tried"; for gates with an interval one of `VERDICTS`."""
        if (leak := self.after.leak) is not None and self.after.interval is not None:
            low, high = self.after.interval
            leaks = not self.after.passed and not low <= 0.5 <= high
            return LEAK_FOUND if leaks else SOUND if leak.excluded < leak.margin else CANNOT_TELL
        return "passed" if self.after.passed else "failed" if self.tried else "not tried"

    def to_json(self) -> dict[str, Any]:
        """Return the result, JSON-ready."""
        return {
            "gate": self.name,
            "definition": self.definition,
            "before": self.before and self.before.to_json(),
            "after": self.after.to_json(),
            "dropped": self.dropped,
            "relaxed": self.relaxed,
            "verdict": self.verdict,
        }


def share_found(pairs: Sequence[Pair], reasons: Mapping[str, str]) -> GateFigure:
    """Return the figure of a share of pairs with a fault, which must be 0."""
    first = next(iter(reasons.values()), None)
    share = len(reasons) / len(pairs) if pairs else None
    return GateFigure(share, len(pairs), passed=not reasons, note=f"first: {first}" if first else "")


def chance_figure(
    values: Sequence[float],
    pairs: Sequence[Pair],
    *,
    gates: GateSettings,
    either_way: bool,
    note: str = "",
    planted: str,
    wider: float | None = None,
    detectable: float | None = None,
) -> GateFigure:
    """Return the mean of verdicts, whose interval over users must contain 0.5, and the leak that it leaves possible.

    Args:
      values: [n] of the n > 0 pairs: 1 if the chosen answer was found, 0 if the other one was, 0.5 for neither.
      either_way: If True, less than 0.5 fails too; a classifier fitted to other pairs can only be too good.
      planted: Kind of leak that `detectable` measures, in words.
      wider: Factor of a classifier's standard error: its verdicts depend on each other beyond users.
      detectable: Smallest leak that a classifier finds; other gates use the closed form.
    """
    from scipy.special import stdtrit  # slow to import

    numbers = np.asarray(values, np.float64)
    users = clusters_of([pair.comparison for pair in pairs]).users
    interval = difference_interval(np.rint(2 * numbers - 1), Clusters(users), level=gates.level)
    mean = float(numbers.mean())
    if interval.standard_error is None or interval.degrees is None:
        return GateFigure(mean, len(pairs), passed=False, note=f"no interval: {interval.reason}")
    error, degrees = interval.standard_error / 2 * (wider or 1.0), interval.degrees
    half = float(stdtrit(degrees, (1 + gates.level) / 2)) * error
    low, high = max(mean - half, 0.0), min(mean + half, 1.0)
    passed = low <= 0.5 and (high >= 0.5 or not either_way)
    ends = tost(mean - 0.5, standard_error=error, degrees=degrees, margin=gates.margin).ci90
    excluded = min(max(ends[1], -ends[0] if either_way else 0.0), 0.5)
    if wider is None:
        detectable = smallest_shift(numbers, standard_error=error, degrees=degrees, level=gates.level)
    passed = passed and (excluded < gates.margin or not gates.require_sound)
    leak = Leak(gates.margin, excluded, detectable, planted)
    return GateFigure(mean, len(pairs), (low, high), passed, note, leak)
