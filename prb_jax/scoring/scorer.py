"""What can be evaluated: the protocol of scorers, and those without weights (baselines, plain functions)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, cast, overload, runtime_checkable

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.options import refuse_given
from prb_jax.data.records import Records, as_comparisons
from prb_jax.errors import RunError, quote
from prb_jax.plugins import get_plugin, python_value
from prb_jax.scoring.baselines import BASELINE_NAMES, ORACLES, score_baseline
from prb_jax.scoring.prompt_extras import UPPER_BOUND
from prb_jax.sources.large import windows
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.view import View
from prb_jax.trees.tree import ScoredBatch, Truncation

if TYPE_CHECKING:
    from prb_jax.scoring.reader import Reader

PLUGIN: Final = "plugin:"
"""Before the name of an entry point prb_jax.rewards, where a model is named."""

READS_TEXTS: Final = "{} reads the whole text of profile, prompt and responses, and computes on no device"


class Scorer(Protocol):
    """A model that can be evaluated: ``RewardModel``, a baseline, or code of your own.

    What else a scorer may have, the protocols below say.
    """

    def identity(self) -> Mapping[str, Any]:
        """Everything about the model that decides its scores, JSON-ready.

        ``name`` is shown in tables; where there are other entries, they decide and the name may change.
        """
        ...

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        profile_posts: int,
        protocol: str,
        max_length: int | None,
        skip: Callable[[Sequence[int]], bool],
    ) -> Iterator[ScoredBatch]:
        """Scores every comparison once, in any order.

        ``skip(indices)`` is True for a batch whose scores are all known; it need not be computed. The
        composition of batches must not depend on it, so that a continued run gives equal scores.
        """
        ...


@runtime_checkable
class ReadsTokens(Protocol):
    """A scorer of a model that reads tokens, and so has a length limit, and perhaps a view that it was trained with."""

    @property
    def reader(self) -> Reader:
        """How comparisons are read for it."""
        ...

    def accepting(self, view: View) -> Scorer:
        """Return the same scorer, which does not warn of this view again."""
        ...


@runtime_checkable
class DecidesItself(Protocol):
    """A scorer that decides by itself what it is shown, but for the options that it uses; `decided` says how."""

    uses: ClassVar[tuple[str, ...]]

    @property
    def decided(self) -> str: ...


@runtime_checkable
class Served(Protocol):
    """A scorer behind a server: what a run should say of it, and what the server says that it shows its model."""

    @property
    def remarks(self) -> Sequence[str]: ...
    @property
    def view(self) -> Mapping[str, Any] | None: ...


@runtime_checkable
class HasJudgements(Protocol):
    """A scorer that keeps more of each comparison than scores, and sums it up."""

    def judge_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the figures of all comparisons, JSON-ready."""
        ...

    def kept_in(self, folder: Path) -> Scorer:
        """Return the same scorer, which keeps its judgements in this run folder."""
        ...


@runtime_checkable
class AdaptsToUsers(Protocol):
    """A scorer that learns of a user from comparisons; what it reads of a comparison was decided when it was fitted.

    Attributes:
      left_out: how many comparisons of its history tell nothing, by reason.
    """

    left_out: Mapping[str, int]

    def with_history(self, history: Sequence[Comparison]) -> Scorer:
        """Return the same scorer, adapted to the users of these comparisons alone."""
        ...

    def with_states(self, folder: Path) -> Scorer:
        """Return the same scorer, which knows the users whose states are saved in a folder, and no others."""
        ...

    def with_other_states(self, comparisons: Sequence[Comparison]) -> Scorer:
        """Return the same scorer for a control that names another user in place of that of each comparison."""
        ...

    def fitted_on(self, comparisons: Sequence[Comparison]) -> set[str]:
        """Return the users of the comparisons on whom it was fitted."""
        ...

    def unknown(self, comparisons: Sequence[Comparison]) -> set[str]:
        """Return the users of the comparisons of whom nothing is known."""
        ...


def refuse_unused(scorer: Scorer, given: Mapping[str, Any]) -> None:
    """Raise RunError for a choice of what the model is shown that has no effect on this kind of scorer."""
    if isinstance(scorer, PlainScorer) and given["protocol"] == TextProtocol.DEFAULT:
        given = {**given, "protocol": None}
    if isinstance(scorer, DecidesItself):
        refuse_given(
            {name: value for name, value in given.items() if name not in scorer.uses}, scorer.decided
        )


_BATCH = 4096

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

    uses: ClassVar[tuple[str, ...]] = ()

    @property
    def decided(self) -> str:
        """As of :class:`DecidesItself`."""
        return READS_TEXTS.format(self.name)

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

    def reward(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        response: str,
        *,
        profile: Sequence[Mapping[str, Any]] = (),
        user_id: str | None = None,
    ) -> float:
        """Return the reward of a single response; arguments as of :meth:`prb_jax.RewardModel.reward`."""
        comparison = Comparison(
            id="reward", prompt=prompt, responses=[response], profile=profile, user_id=user_id
        )
        return float(self.score(comparison)[0])

    def identity(self) -> Mapping[str, Any]:
        """Return the name, which decides everything that can be known, and the facts."""
        return {"name": self.name, **self.facts}

    def stream(self, comparisons: Sequence[Comparison], *, skip: Any, **_: Any) -> Iterator[ScoredBatch]:
        """Score large batches, or each comparison as a batch of its own."""
        size = 1 if self.one_by_one else _BATCH
        for window in windows(comparisons, first=size, size=size):
            if not skip(indices := window.places):
                scores = self.compute(window.comparisons)
                yield ScoredBatch(indices, scores, [0] * len(indices), [Truncation()] * len(indices))
            del window  # not held while the next one is read


def baseline_scorer(name: str) -> PlainScorer:
    """Return a built-in baseline by its name.

    Raises:
      RunError: there is no such baseline.
    """
    if name not in BASELINE_NAMES:
        raise RunError(f"unknown baseline {quote(name)}; there are {', '.join(BASELINE_NAMES)}")
    facts = {UPPER_BOUND: name} if name in ORACLES else {}
    return PlainScorer(name, functools.partial(score_baseline, name), facts, one_by_one=False)


def function_scorer(function: ScoreFunction, *, name: str | None = None, **facts: Any) -> PlainScorer:
    """Return a function of a comparison as a scorer.

    Args:
      function: that scores.
      name: by which it is known; its qualified name if not given.
      facts: what tells a change of its code, where that is seen.

    Raises:
      RunError: later, where the function does not give K finite numbers.
    """
    qualified = getattr(function, "__qualname__", None) or type(function).__qualname__
    called = name or f"{getattr(function, '__module__', None) or '?'}.{qualified}"

    def compute(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
        return [_checked(function(comparison), comparison, name=called) for comparison in comparisons]

    facts = facts or {"code": "not recorded: a change of the function's code is not seen"}
    return PlainScorer(called, compute, {"function": called, **facts}, one_by_one=True)


def plugin_scorer(name: str) -> PlainScorer:
    """Return the function of an entry point, as plugin:NAME, as a scorer; errors as of :func:`get_plugin`."""
    plugin = get_plugin("rewards", name.removeprefix(PLUGIN))
    return function_scorer(plugin.value, name=name, code=plugin.origin)


def file_scorer(name: str) -> PlainScorer:
    """Return the function of a file, as FILE.py:NAME, as a scorer; the file is run, and known by its bytes.

    Raises:
      RunError: there is no such file or function, or the file fails.
    """
    file = Path(name.rpartition(":")[0])
    found = python_value(name)
    if not callable(found.value):
        raise RunError(
            f"{file}: expected a function {found.name} of a comparison, found {quote(found.value)}"
        )
    code = "of this file alone: a change of what it imports is not seen"
    digest = sha256(file.read_bytes()).hexdigest()
    return function_scorer(cast(ScoreFunction, found.value), name=found.name, code=code, sha256=digest)


def _checked(values: Any, comparison: Comparison, *, name: str) -> np.ndarray:
    expected = len(comparison.responses)
    try:
        scores = np.asarray(values)
        with np.errstate(over="ignore"):  # refused below
            numbers = scores.astype(np.float32) if scores.dtype.kind in "biuf" else None
    except (ValueError, TypeError):  # rows of different lengths, objects that are no numbers
        numbers = None
    if numbers is None or numbers.shape != (expected,) or not np.isfinite(numbers).all():
        shown = quote(values.tolist() if isinstance(values, np.ndarray) else values)
        raise RunError(
            f"{name}: comparison {quote(comparison.id)}: expected {expected} finite numbers, one for each response, "
            f"found {shown}"
        )
    return numbers
