"""Anything that scores: the base class of reward models, fitted methods, baselines, judges and servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from prb_jax.errors import public_dir
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Records, as_comparisons
from prb_jax.records.items import Held
from prb_jax.records.options import refuse_given
from prb_jax.scoring.inputs import warn_of_cuts, warn_without_profiles
from prb_jax.text.view import ChosenView, View, ViewOptions, choose_view
from prb_jax.trees.tree import Skip, skip_nothing

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from prb_jax.scoring.reader import Reader
    from prb_jax.trees.tree import ScoredBatch

ScoreFunction = Callable[[Comparison], Sequence[float]]
"""Returns K finite numbers for the K responses of a comparison; a higher number is better."""


class Scorer:
    """Anything that scores comparisons.

    A subclass defines `identity` and `stream`. All other methods have defaults for a scorer that reads whole
    comparisons, so evaluation, controls and servers use one interface for every scorer.
    """

    reader: Reader | None = None  # turns comparisons into tokens; None for scorers without a length limit
    mesh: Mesh | None = None  # device mesh
    # options of a caller that have an effect; `decided` is the reason why others have none
    uses: ClassVar[tuple[str, ...]] = ("profile_posts", "protocol", "max_length", "batch_tokens")
    has_prompt: ClassVar[bool] = False  # True if its prompt can contain hints
    has_heading: ClassVar[bool] = (
        False  # True if the prompt has our heading above the posts; a run records its wording
    )
    has_weights: ClassVar[bool] = (
        True  # False for functions of texts, and for models behind a server that scores
    )
    adapts: ClassVar[bool] = False  # True if it learns users from comparisons
    # True if the score of a response depends on the other responses, so none may be left out
    compares: bool = False
    judges: ClassVar[bool] = False  # True for a language model that gives verdicts

    __dir__ = public_dir

    def identity(self) -> Mapping[str, Any]:
        """Return everything about the model that decides its scores, JSON-ready.

        Tables show ``name``. If there are other entries, only they identify the model, and the name may change.
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
          comparisons: Comparisons to score; labels are ignored.
          view: How much of a comparison the model sees, from `choose_view`; the scorer's default if not given.
          batch_tokens: Approximate number of tokens computed at a time.
          skip: Returns True if these rows do not need scores. Other batches must not depend on `skip`; otherwise a
            continued run would give different scores.
        """
        raise NotImplementedError

    @property
    def decided(self) -> str:
        """Reason why an option that is not in `uses` has no effect."""
        return ""

    def choose_view(self, options: ViewOptions) -> ChosenView:
        """Return the model's view of a comparison for these options."""
        return choose_view(None, options) if self.reader is None else self.reader.choose_view(options)

    def refuse_unused(self, given: Mapping[str, Any]) -> None:
        """Raise RunError for an option that has no effect on this scorer."""
        refuse_given({name: value for name, value in given.items() if name not in self.uses}, self.decided)

    def remarks(self, view: View) -> Sequence[str]:
        """Return sentences that a run should print and record."""
        return () if self.reader is None else self.reader.remarks(view.protocol)

    def sees_users(self, comparisons: Sequence[Comparison], view: View) -> bool:
        """Return True if the model sees any user information of these comparisons."""
        return any(one.profile or one.user_id is not None for one in comparisons)

    def unknown(self, comparisons: Sequence[Any]) -> set[str] | None:
        """Return the users without any information; None if the scorer does not distinguish users."""
        return None if self.reader is None else self.reader.unknown_users(comparisons)

    def own_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return entries of the summary about the scorer itself, JSON-ready."""
        return {}

    def judge_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return figures on the judgements of all comparisons, JSON-ready; empty for a scorer without judgements."""
        return {}

    def kept_in(self, folder: Path) -> Scorer:
        """Return the same scorer, which writes its further outputs to this run folder."""
        return self

    def with_history(self, history: Sequence[Comparison] | Path) -> Scorer:
        """Return the same scorer, adapted only to the users of these comparisons, or of the states in a folder."""
        return self

    def with_other_states(self, comparisons: Sequence[Comparison]) -> Scorer:
        """Return the same scorer for a control that names another user in place of the user of each comparison."""
        return self

    def rendered_mark(self, text: str) -> str | None:
        """Return the mark that shows that the model's own chat template has rendered a text already, or None."""
        return None if self.reader is None else self.reader.tokenizer.rendered_mark(text)

    def explain_scores(self) -> str:
        """Return a sentence on the weights that may explain unusable scores; empty if unknown."""
        return ""

    @property
    def attention(self) -> str | None:
        """Name of the attention implementation of its programs."""
        return None

    @property
    def tokenizer(self) -> Any:
        """Tokenizer; if it has `render` and `template_hash`, it writes the texts of RewardBench's result files."""
        return None


class GivesRewards(Scorer):
    """A model whose `score` accepts records; it can also score a single response."""

    def _in_order(
        self, comparisons: Records, *, view: View, batch_tokens: int | None
    ) -> np.ndarray | list[np.ndarray]:
        """Return the scores from `stream` in the order given; only the array for a single comparison."""
        several = as_comparisons(comparisons, labelled=False)
        warn_without_profiles(Held(several), self.reader, view=view)
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(several)
        cut = 0
        for batch in self.stream(several, view=view, batch_tokens=batch_tokens):
            cut += sum(truncation.any for truncation in batch.truncation)
            for index, row in zip(batch.indices, batch.scores, strict=True):
                scores[index] = row
        if cut:
            warn_of_cuts(cut, len(several), str(self.identity().get("name", "the model")))
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
          response: The text to score.
          profile, user_id: The user, as in a `Comparison`.
          options: Options of `score`.
        """
        comparison = Comparison(
            id="reward", prompt=prompt, responses=[response], profile=profile, user_id=user_id
        )
        model: Any = self
        return float(model.score(comparison, **options)[0])


class ScoresTokens(Protocol):
    """A `flax.nnx.Module` of your own, which can be evaluated and trained together with a tokenizer."""

    def score_tokens(self, tokens: Any, lengths: Any, /) -> Any:
        """Return the rewards float32 [B] of sequences int32 [B, T], each with `lengths` int32 [B] valid tokens.

        Every length is at least 1. The rewards depend only on the parameters and the valid tokens.
        """
        ...


class StreamsScores(Protocol):
    """An object of your own that scores, without the base class `Scorer`; three keywords describe the view."""

    def identity(self) -> Mapping[str, Any]: ...
    def stream(
        self, comparisons: Any, *, profile_posts: int, protocol: str, max_length: int | None, skip: Skip
    ) -> Iterator[ScoredBatch]: ...
