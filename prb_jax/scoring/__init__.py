"""From a model and comparisons to scores on disk: the scorer, resumable runs, evaluation, baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from prb_jax.records.comparison import Comparison
    from prb_jax.scoring.reader import Reader
    from prb_jax.text.view import View
    from prb_jax.trees.tree import ScoredBatch

TOO_LONG = ("error", "skip")  # what happens to a comparison whose response leaves no room for its prompt

HISTORY = "labelled comparisons of which a fitted method learns the users, or a folder of their saved states"
"""The meaning of `history` wherever a model may be such a method."""

NO_CONTROLS = "none"
CONTROLS = (NO_CONTROLS, "blind", "swap", "all")
"""What the model is scored with once more: no profile, another user's profile."""


class Scorer(Protocol):
    """A model that can be evaluated: ``RewardModel``, a baseline, or code of your own.

    The protocols below say what else a scorer may have.
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


class ScoresTokens(Protocol):
    """A `flax.nnx.Module` of your own: it is evaluated and trained with the tokenizer that you name beside it."""

    def score_tokens(self, tokens: Any, lengths: Any, /) -> Any:
        """Return the rewards float32 [B] of sequences int32 [B, T], of which the first lengths int32 [B] tokens count.

        Every length is at least 1. The rewards depend on nothing but the parameters and these tokens.
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
    """A scorer that learns of a user from comparisons; what it reads of a comparison was decided when it was fitted."""

    left_out: Mapping[str, int]  # how many comparisons of its history tell nothing, by reason

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


class GivesRewards:
    """A model whose `score` takes records: it gives the reward of a single response too."""

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
          prompt: the question, or the conversation before the response.
          response: the text to be scored.
          profile, user_id: as of a `Comparison`.
          options: as of `score`.
        """
        from prb_jax.records.comparison import Comparison

        comparison = Comparison(
            id="reward", prompt=prompt, responses=[response], profile=profile, user_id=user_id
        )
        model: Any = self
        return float(model.score(comparison, **options)[0])
