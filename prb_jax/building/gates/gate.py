"""What gates look at, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import short_repr
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.scoring.clusters import clusters_of


@dataclass(frozen=True)
class Pair:
    """A pair that was built.

    Attributes:
      comparison: the chosen answer first, with the aspects that it follows.
      finishes: why the two answers end, as of `prb_jax.judges.endpoint.Reply`.
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
    """What a gate measured.

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
        return {
            "value": self.value,
            "n": self.n,
            "interval": None if self.interval is None else list(self.interval),
            "passed": self.passed,
            "note": self.note,
        }


@dataclass(frozen=True)
class GateResult:
    """What one gate says of a build.

    Attributes:
      name: one of `prb_jax.building.settings.GATES`.
      definition: of its figure.
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
    def passed(self) -> bool:
        """Whether what is kept is as it must be."""
        return self.after.passed

    @property
    def verdict(self) -> str:
        """In words: "passed", "failed" or "not tried"."""
        return "passed" if self.passed else "failed" if self.tried else "not tried"

    def to_json(self) -> dict[str, Any]:
        """Return what the gate says, JSON-ready."""
        return {
            "gate": self.name,
            "definition": self.definition,
            "before": None if self.before is None else self.before.to_json(),
            "after": self.after.to_json(),
            "dropped": self.dropped,
            "relaxed": self.relaxed,
            "verdict": self.verdict,
        }


def share_found(pairs: Sequence[Pair], found: Mapping[str, str]) -> Figure:
    """Return the share of pairs with a fault, which must be 0."""
    reason = next(iter(found.values()), "")
    share = len(found) / len(pairs) if pairs else None
    return Figure(share, len(pairs), passed=not found, note=f"the first: {reason}" if reason else "")


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
    found = mean_interval(np.asarray(values, np.float64), users, level=level)
    mean = float(np.mean(values))
    if found.low is None or found.high is None:
        return Figure(mean, len(pairs), passed=False, note=f"no interval: {found.reason}")
    passed = found.low <= 0.5 and (found.high >= 0.5 or not either_way)
    return Figure(mean, len(pairs), (found.low, found.high), passed, note)
