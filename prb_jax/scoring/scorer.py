"""Anything that scores: the base class of reward models, fitted methods, baselines, judges and servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Records, as_comparisons
from prb_jax.records.options import refuse_given
from prb_jax.text.view import ChosenView, View, ViewOptions, choose_view

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from prb_jax.scoring.reader import Reader
    from prb_jax.trees.tree import ScoredBatch

ScoreFunction = Callable[[Comparison], Sequence[float]]
"""Gives K finite numbers for the K responses of a comparison; a higher number is better."""

Skip = Callable[[Sequence[int]], bool]
"""Returns True for a batch of these indices if all its scores are known, so that it need not be computed."""


def skip_nothing(indices: Sequence[int]) -> bool:
    """Return False: every batch needs scores."""
    return False


class Scorer:
    """Anything that scores comparisons.

    A subclass has `identity` and `stream`. Everything else has a default, which is true of a scorer that is given
    whole comparisons, so that evaluation, controls and servers ask every scorer the same questions.
    """

    reader: Reader | None = None  # how comparisons are read for a model of tokens, which has a length limit
    mesh: Mesh | None = None  # the devices
    # choices of a caller that have an effect; `decided` says why others have none
    uses: ClassVar[tuple[str, ...]] = ("profile_posts", "protocol", "max_length", "batch_tokens")
    has_prompt: ClassVar[bool] = False  # whether hints can stand in what it reads
    has_heading: ClassVar[bool] = (
        False  # whether posts stand under a heading of ours, whose words a run records
    )
    has_weights: ClassVar[bool] = (
        True  # False for functions of texts, and for models behind a server that scores
    )
    adapts: ClassVar[bool] = False  # whether it learns a user from comparisons
    # whether what a response is worth depends on the others of its comparison, so that none may be left out
    compares: bool = False
    judges: ClassVar[bool] = False  # whether it is a language model that is asked for a verdict

    def identity(self) -> Mapping[str, Any]:
        """Return everything about the model that decides its scores, JSON-ready.

        ``name`` is shown in tables; if there are other entries, they decide and the name may change.
        """
        raise NotImplementedError

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        view: View | None = None,
        batch_tokens: int | None = None,
        skip: Skip = skip_nothing,
    ) -> Iterator[ScoredBatch]:
        """Score every comparison once, in any order.

        Args:
          comparisons: What is scored; labels are not looked at.
          view: How much of a comparison the model sees, from `choose_view`; the scorer's own view if not given.
          batch_tokens: About how many tokens are computed at a time.
          skip: Returns True for a batch that needs no scores. The other batches must not depend on it, so that a
            continued run gives equal scores.
        """
        raise NotImplementedError

    @property
    def decided(self) -> str:
        """Why a choice that is not among `uses` has no effect."""
        return ""

    def choose_view(self, options: ViewOptions) -> ChosenView:
        """Return what the model sees of a comparison if a caller asks for these options."""
        return choose_view(None, options) if self.reader is None else self.reader.choose_view(options)

    def refuse_unused(self, given: Mapping[str, Any]) -> None:
        """Raise RunError for a choice that has no effect on this scorer."""
        refuse_given({name: value for name, value in given.items() if name not in self.uses}, self.decided)

    def remarks(self, view: View) -> Sequence[str]:
        """Return sentences that a run should print and record."""
        return () if self.reader is None else self.reader.remarks(view.protocol)

    def sees_users(self, comparisons: Sequence[Comparison], view: View) -> bool:
        """Return whether the model sees anything of the users of these comparisons."""
        return any(one.profile or one.user_id is not None for one in comparisons)

    def unknown(self, comparisons: Sequence[Any]) -> set[str] | None:
        """Return the users of whom nothing is known; None for a scorer that knows no users."""
        return None if self.reader is None else self.reader.unknown_users(comparisons)

    def own_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return entries of the summary about the scorer itself, JSON-ready."""
        return {}

    def judge_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return figures of the judgements of all comparisons, JSON-ready; none of a scorer that only scores."""
        return {}

    def kept_in(self, folder: Path) -> Scorer:
        """Return the same scorer, which keeps what it writes beside scores in this run folder."""
        return self

    def with_history(self, history: Sequence[Comparison] | Path) -> Scorer:
        """Return the same scorer, adapted only to the users of these comparisons, or of the states in a folder."""
        return self

    def with_other_states(self, comparisons: Sequence[Comparison]) -> Scorer:
        """Return the same scorer for a control that names another user in place of the user of each comparison."""
        return self

    def explain_scores(self) -> str:
        """Return which weights may be why the scores cannot be used; empty if nothing is known."""
        return ""

    @property
    def attention(self) -> str | None:
        """The implementation of attention in its programs."""
        return None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; one with `render` and `template_hash` writes the texts of RewardBench's result files."""
        return None


class GivesRewards(Scorer):
    """A model whose `score` takes records: it gives the reward of a single response too."""

    def _in_order(
        self, comparisons: Records, *, view: View, batch_tokens: int | None
    ) -> np.ndarray | list[np.ndarray]:
        """Return what `stream` gives for each comparison, in the order given; one array for a single comparison."""
        several = as_comparisons(comparisons, labelled=False)
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(several)
        for batch in self.stream(several, view=view, batch_tokens=batch_tokens):
            for index, row in zip(batch.indices, batch.scores, strict=True):
                scores[index] = row
        return scores[0] if isinstance(comparisons, Comparison | Mapping) else scores

    def reward(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        response: str,
        *,
        profile: Sequence[Mapping[str, Any]] = (),
        user_id: str | None = None,
        **options: Any,
    ) -> float:
        """Return the reward of a single response.

        Args:
          prompt: The question, or the conversation before the response.
          response: The text to be scored.
          profile, user_id: The user, as in a `Comparison`.
          options: Options of `score`.
        """
        comparison = Comparison(
            id="reward", prompt=prompt, responses=[response], profile=profile, user_id=user_id
        )
        model: Any = self
        return float(model.score(comparison, **options)[0])


class ScoresTokens(Protocol):
    """A `flax.nnx.Module` of your own: it is evaluated and trained with the tokenizer that you name beside it."""

    def score_tokens(self, tokens: Any, lengths: Any, /) -> Any:
        """Return the rewards float32 [B] of sequences int32 [B, T], of which the first lengths int32 [B] tokens count.

        Every length is at least 1. The rewards depend on nothing but the parameters and these tokens.
        """
        ...


class StreamsScores(Protocol):
    """An object of your own that scores, without the base class `Scorer`: its view is three keywords."""

    def identity(self) -> Mapping[str, Any]: ...
    def stream(
        self, comparisons: Any, *, profile_posts: int, protocol: str, max_length: int | None, skip: Skip
    ) -> Iterator[ScoredBatch]: ...


@dataclass(frozen=True)
class OwnScorer(Scorer):
    """An object of a user with `identity` and `stream`, as a scorer."""

    own: StreamsScores

    def identity(self) -> Mapping[str, Any]:
        """Return what the object says of itself."""
        return self.own.identity()

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        view: View | None = None,
        batch_tokens: int | None = None,
        skip: Skip = skip_nothing,
    ) -> Iterator[ScoredBatch]:
        """Score with the object's own `stream`, which takes `batch_tokens` only if they are given."""
        shown: dict[str, Any] = dict.fromkeys(("profile_posts", "protocol", "max_length"))
        shown |= {} if view is None else view.shown
        shown |= {} if batch_tokens is None else {"batch_tokens": batch_tokens}
        return self.own.stream(comparisons, skip=skip, **shown)

    @property
    def tokenizer(self) -> Any:
        """The object's tokenizer, if it has one."""
        return getattr(self.own, "tokenizer", None)
