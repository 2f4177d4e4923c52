"""Scorers without weights: the built-in baselines, and plain functions of a comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.records import Records, as_comparisons
from prb_jax.errors import RunError, quote
from prb_jax.scoring.baselines import BASELINE_NAMES, ORACLES, score_baseline
from prb_jax.scoring.hints import UPPER_BOUND
from prb_jax.sources.large import windows
from prb_jax.trees.batches import ScoredBatch
from prb_jax.trees.tree import Truncation

_BATCH = 4096

BaselineName = Literal[
    "baseline:length",
    "baseline:shorter",
    "baseline:first",
    "baseline:random",
    "baseline:profile-overlap",
    "baseline:popularity",
    "baseline:nearest-users",
    "baseline:persona-truth",
]
ScoreFunction = Callable[[Comparison], Sequence[float]]
"""Gives K finite numbers for the K responses of a comparison; a higher number is better."""


@dataclass(frozen=True)
class PlainScorer:
    """A scorer that reads the text of a comparison, its whole profile too: it has no weights and no tokens.

    Attributes:
      name: as it is shown in tables.
      compute: float32 scores [K] of each of some comparisons.
      facts: all else that `run.json` says of it.
      one_by_one: whether it is asked for one comparison at a time, so that each score is kept at once.
    """

    name: str
    compute: Callable[[Sequence[Comparison]], list[np.ndarray]]
    facts: Mapping[str, Any]
    one_by_one: bool

    @overload
    def score(  # pyright: ignore[reportOverlappingOverload] - a mapping is one record
        self, comparisons: Comparison | Mapping[str, Any]
    ) -> np.ndarray: ...
    @overload
    def score(self, comparisons: Records) -> list[np.ndarray]: ...
    def score(self, comparisons: Records) -> np.ndarray | list[np.ndarray]:
        """Return one float32 array [K] a comparison or record; of a single one, its array."""
        scores = self.compute(as_comparisons(comparisons, labelled=False))
        return scores[0] if isinstance(comparisons, Comparison | Mapping) else scores

    def identity(self) -> Mapping[str, Any]:
        """Return the name, which decides everything that can be known, and the facts."""
        return {"name": self.name, **self.facts}

    def stream(self, comparisons: Sequence[Comparison], *, skip: Any, **_: Any) -> Iterator[ScoredBatch]:
        """Score large batches, or each comparison as a batch of its own."""
        size = 1 if self.one_by_one else _BATCH
        for indices in windows(comparisons, first=size, size=size):
            if not skip(indices):
                scores = self.compute([comparisons[index] for index in indices])
                yield ScoredBatch(indices, scores, [0] * len(indices), [Truncation()] * len(indices))


def baseline_scorer(name: str, **options: Any) -> PlainScorer:
    """Return a built-in baseline by its name.

    Raises:
      RunError: there is no such baseline, or an option is given: a baseline has none.
    """
    if name not in BASELINE_NAMES:
        raise RunError(f"unknown baseline {quote(name)}; there are {', '.join(BASELINE_NAMES)}")
    refuse_options(name, **options)
    facts = {UPPER_BOUND: name} if name in ORACLES else {}
    return PlainScorer(name, functools.partial(score_baseline, name), facts, one_by_one=False)


def function_scorer(function: ScoreFunction, *, name: str | None = None) -> PlainScorer:
    """Return a function of a comparison as a scorer.

    Its name is all that a run folder knows of it: a change of its code is not seen.

    Raises:
      RunError: later, where the function does not give K finite numbers.
    """
    qualified = getattr(function, "__qualname__", None) or type(function).__qualname__
    called = name or f"{getattr(function, '__module__', None) or '?'}.{qualified}"

    def compute(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
        return [_checked(function(one), one, name=called) for one in comparisons]

    facts = {"function": called, "code": "not recorded: a change of the function's code is not seen"}
    return PlainScorer(called, compute, facts, one_by_one=True)


def refuse_options(name: str, **options: Any) -> None:
    """Raise RunError for an option without effect: these scorers have no weights, no tokens and no protocol."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise RunError(
            f"{', '.join(given)}: {name} reads the whole text of profile, prompt and responses, and computes on "
            "no device: leave out here"
        )


def _checked(values: Any, comparison: Comparison, *, name: str) -> np.ndarray:
    expected = len(comparison.responses)
    try:
        scores = np.asarray(values)
        with np.errstate(over="ignore"):  # refused below
            numbers = scores.astype(np.float32) if scores.dtype.kind in "biuf" else None
    except (ValueError, TypeError):  # rows of different lengths, objects that are no numbers
        numbers = None
    if numbers is None or numbers.shape != (expected,) or not np.isfinite(numbers).all():
        found = quote(values.tolist() if isinstance(values, np.ndarray) else values)
        raise RunError(
            f"{name}: comparison {quote(comparison.id)}: expected {expected} finite numbers, one for each response, "
            f"found {found}"
        )
    return numbers
