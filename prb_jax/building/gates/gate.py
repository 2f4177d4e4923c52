"""Pairs, as gates look at them, and the figures that gates give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import short_repr
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.scoring.comparison_table import clusters_of


@dataclass(frozen=True)
class Pair:
    """A pair that was built.

    Attributes:
      comparison: the chosen answer first, with the aspects that it follows.
      finishes: why the two answers end, as of the replies of a language model.
      provenance: how it came about.
    """

    comparison: Comparison
    finishes: tuple[str | None, str | None] = (None, None)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    @property
    def id(self) -> str:
        """Its name."""
        return self.comparison.id

    @property
    def chosen(self) -> str:
        """The answer that follows the aspects."""
        return self.comparison.responses[0]

    @property
    def rejected(self) -> str:
        """The answer that avoids them."""
        return self.comparison.responses[1]


@dataclass(frozen=True)
class Figure:
    """The figure of a gate.

    Attributes:
      value: the figure; None where there is nothing to measure.
      n: pairs that it is of.
      interval: of a figure that must be 0.5 but for chance.
      passed: whether it is as it must be.
      note: what else is to be said of it.
    """

    value: float | None
    n: int
    interval: tuple[float, float] | None = None
    passed: bool = True
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the figure, JSON-ready."""
        return asdict(self) | {"interval": self.interval and list(self.interval)}


@dataclass(frozen=True)
class GateResult:
    """The result of one gate.

    Attributes:
      name: of the gate, and `definition` of its figure, as `prb_jax.building.settings.DEFINITIONS` has them.
      before: of what the generator wrote first; None where that was not measured.
      after: of the pairs that are kept.
      dropped: pairs that were left out for it.
      relaxed: whether it may fail.
      tried: whether anything was given to try it.
    """

    name: str
    definition: str
    before: Figure | None
    after: Figure
    dropped: int = 0
    relaxed: bool = False
    tried: bool = True

    @property
    def verdict(self) -> str:
        """In words: "passed", "failed" or "not tried"."""
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


def share_found(pairs: Sequence[Pair], reasons: Mapping[str, str]) -> Figure:
    """Return the share of pairs with a fault, which must be 0."""
    first = next(iter(reasons.values()), None)
    share = len(reasons) / len(pairs) if pairs else None
    return Figure(share, len(pairs), passed=not reasons, note=f"the first: {first}" if first else "")


def chance_figure(
    values: Sequence[float], pairs: Sequence[Pair], *, level: float, either_way: bool, note: str = ""
) -> Figure:
    """Return the mean of verdicts, which must be 0.5 within its interval over users.

    Args:
      values: [n] of the pairs: 1 where the chosen answer was told, 0 where the other one was, 0.5 for neither.
      pairs: [n].
      level: of the interval.
      either_way: whether less than 0.5 fails too; a classifier that was fitted to other pairs may only be too good.
      note: goes with the figure.
    """
    if not pairs:
        return Figure(None, 0, passed=False, note="no pairs")
    users = clusters_of([pair.comparison for pair in pairs]).users
    interval = mean_interval(np.asarray(values, np.float64), users, level=level)
    mean = float(np.mean(values))
    if interval.low is None or interval.high is None:
        return Figure(mean, len(pairs), passed=False, note=f"no interval: {interval.reason}")
    passed = interval.low <= 0.5 and (interval.high >= 0.5 or not either_way)
    return Figure(mean, len(pairs), (interval.low, interval.high), passed, note)
