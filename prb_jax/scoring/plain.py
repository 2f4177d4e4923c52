"""Scorers without weights: functions of a comparison and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, cast, overload

import numpy as np

from prb_jax.errors import RunError, quote
from prb_jax.plugins import python_value
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Records, as_comparisons
from prb_jax.records.items import windows
from prb_jax.scoring import READS_TEXTS
from prb_jax.scoring.scorer import GivesRewards, ScoreFunction
from prb_jax.seams import get
from prb_jax.text.view import TextProtocol
from prb_jax.trees.tree import ScoredBatch, Skip, Truncation, skip_nothing

PLUGIN = "plugin:"  # prefix for the name of an entry point of the group prb_jax.rewards

_BATCH = 4096


@dataclass(frozen=True)
class PlainScorer(GivesRewards):
    """A scorer that reads the text of a comparison with the whole profile, without weights and tokens.

    Attributes:
      name: Name in tables.
      compute: Returns the float32 scores [K] of each comparison.
      facts: Further entries of its identity in `run.json`.
      one_by_one: If True, score one comparison at a time and save each score at once.
    """

    name: str
    compute: Callable[[Sequence[Comparison]], list[np.ndarray]]
    facts: Mapping[str, Any]
    one_by_one: bool

    uses: ClassVar[tuple[str, ...]] = ()
    has_weights: ClassVar[bool] = False

    @property
    def decided(self) -> str:
        """Reason why it has no options."""
        return READS_TEXTS.format(self.name)

    def refuse_unused(self, given: Mapping[str, Any]) -> None:
        """Raise RunError for any option but the default protocol, which matches the text it reads."""
        is_default = given["protocol"] == TextProtocol.DEFAULT
        super().refuse_unused({**given, "protocol": None} if is_default else given)

    @overload
    def score(  # pyright: ignore[reportOverlappingOverload] - a mapping is one record
        self, comparisons: Comparison | Mapping[str, Any]
    ) -> np.ndarray: ...
    @overload
    def score(self, comparisons: Records) -> list[np.ndarray]: ...
    def score(self, comparisons: Records) -> np.ndarray | list[np.ndarray]:
        """Return one float32 array [K] per comparison or record; only the array for a single one."""
        scores = self.compute(as_comparisons(comparisons, labelled=False))
        return scores[0] if isinstance(comparisons, Comparison | Mapping) else scores

    def identity(self) -> Mapping[str, Any]:
        """Return the name and the facts."""
        return {"name": self.name, **self.facts}

    def stream(
        self, comparisons: Sequence[Comparison], *, skip: Skip = skip_nothing, **_: Any
    ) -> Iterator[ScoredBatch]:
        """Score large batches, or one comparison per batch if `one_by_one`."""
        size = 1 if self.one_by_one else _BATCH
        for window in windows(comparisons, first=size, size=size):
            if not skip(indices := window.places):
                scores = self.compute(window.comparisons)
                yield ScoredBatch(indices, scores, [0] * len(indices), [Truncation()] * len(indices))
            del window  # freed before the next one is read


def function_scorer(
    function: ScoreFunction, *, name: str | None = None, recorded: bool = False, **facts: Any
) -> PlainScorer:
    """Return a scorer that calls a function for each comparison.

    Args:
      function: Returns K finite numbers for the K responses of a comparison; a higher number is better.
      name: Name in tables and records; the qualified name if not given.
      recorded: True if a run folder identifies the function by its name.
      facts: Facts that change with the function's code, if changes can be detected.

    Raises:
      RunError: A recorded lambda lacks a name; or, when scoring, the function does not return K finite numbers.
    """
    qualified = getattr(function, "__qualname__", None) or type(function).__qualname__
    called = name or f"{getattr(function, '__module__', None) or '?'}.{qualified}"

    def compute(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
        return [_checked(function(comparison), comparison, name=called) for comparison in comparisons]

    if recorded and name is None and "<lambda>" in called:
        raise RunError(f"{called}: a lambda has no name of its own; pass name=...")
    facts = facts or {"code": "not recorded: a change of the function's code is not seen"}
    return PlainScorer(called, compute, {"function": called, **facts}, one_by_one=True)


def plugin_scorer(name: str) -> PlainScorer:
    """Return a scorer for the entry point "plugin:NAME"; errors as in :func:`prb_jax.seams.get`."""
    plugin = get("rewards", name.removeprefix(PLUGIN))
    return function_scorer(plugin.value, name=name, code=plugin.origin)


def file_scorer(name: str) -> PlainScorer:
    """Return a scorer for the function "FILE.py:NAME"; run the file and record the digest of its bytes.

    Raises:
      RunError: The file or function does not exist, or the file raises an error.
    """
    file = Path(name.rpartition(":")[0])
    function = python_value(name)
    if not callable(function.value):
        raise RunError(
            f"{file}: expected a function {function.name} of a comparison, found {quote(function.value)}"
        )
    code = "of this file alone: a change of what it imports is not seen"
    digest = sha256(file.read_bytes()).hexdigest()
    return function_scorer(cast(ScoreFunction, function.value), name=function.name, code=code, sha256=digest)


def _checked(values: Any, comparison: Comparison, *, name: str) -> np.ndarray:
    expected = len(comparison.responses)
    try:
        scores = np.asarray(values)
        with np.errstate(over="ignore"):  # refused below
            numbers = scores.astype(np.float32) if scores.dtype.kind in "biuf" else None
    except (ValueError, TypeError):  # rows of different lengths, or objects that are not numbers
        numbers = None
    if numbers is None or numbers.shape != (expected,) or not np.isfinite(numbers).all():
        shown = quote(values.tolist() if isinstance(values, np.ndarray) else values)
        raise RunError(
            f"{name}: comparison {quote(comparison.id)}: expected {expected} finite numbers, one for each response, "
            f"found {shown}"
        )
    return numbers
