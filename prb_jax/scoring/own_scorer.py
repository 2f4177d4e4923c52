"""Objects of a user that score without the base class `Scorer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prb_jax.records.comparison import Comparison
from prb_jax.scoring.scorer import Scorer, StreamsScores
from prb_jax.text.view import View
from prb_jax.trees.tree import ScoredBatch, Skip, skip_nothing


@dataclass(frozen=True)
class OwnScorer(Scorer):
    """Scorer that wraps a user's object with `identity` and `stream`."""

    own: StreamsScores

    def identity(self) -> Mapping[str, Any]:
        """Return the identity of the object."""
        return self.own.identity()

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        view: View | None = None,
        batch_tokens: int | None = None,
        skip: Skip = skip_nothing,
    ) -> Iterator[ScoredBatch]:
        """Score with the object's own `stream`; pass `batch_tokens` only if given."""
        shown: dict[str, Any] = dict.fromkeys(("profile_posts", "protocol", "max_length"))
        shown |= {} if view is None else view.shown
        shown |= {} if batch_tokens is None else {"batch_tokens": batch_tokens}
        return self.own.stream(comparisons, skip=skip, **shown)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the object, if any."""
        return getattr(self.own, "tokenizer", None)
