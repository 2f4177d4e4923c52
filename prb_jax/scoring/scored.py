"""What a scorer is to the rest: an identity, and a stream of scored batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import short_repr
from prb_jax.text.view import ChosenView, View
from prb_jax.trees.tree import Truncation


@dataclass(frozen=True)
class ScoredBatch:
    """The scores of some of the comparisons given to ``Scorer.stream``.

    Attributes:
      indices: positions in the list of comparisons, without the padding of the batch.
      scores: one float32 array [K] for each index, in the order of the comparison's responses.
      tokens: tokens computed for each index: the shared prefix once, and every response.
      truncation: what was cut from each index to make it fit.
    """

    indices: Sequence[int]
    scores: Sequence[np.ndarray]
    tokens: Sequence[int]
    truncation: Sequence[Truncation]

    __repr__ = short_repr


class Scorer(Protocol):
    """A model that can be evaluated: ``RewardModel``, a baseline, or code of your own."""

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
class KnowsView(Protocol):
    """A scorer that knows the view it was trained with."""

    def choose_view(
        self, *, profile_posts: int | None, protocol: str | None, max_length: int | None
    ) -> ChosenView:
        """Return what it is shown where this is asked for; None asks for nothing."""
        ...

    def accepting(self, view: View) -> Scorer:
        """Return the same scorer, which does not warn of this view again."""
        ...


@runtime_checkable
class Remarks(Protocol):
    """A scorer that does something under a protocol that its user should know of."""

    def remarks(self, *, protocol: str) -> list[str]:
        """Sentences to show and to record.

        Raises:
          CheckpointError: this protocol cannot be followed.
        """
        ...


@runtime_checkable
class KnowsUsers(Protocol):
    """A scorer that was trained on single users."""

    def unknown_users(self, comparisons: Sequence[Comparison]) -> int | None:
        """How many users among those of the comparisons it was not trained on; None if it knows no users."""
        ...


@runtime_checkable
class Quantized(Protocol):
    """A scorer whose weights may be quantised."""

    @property
    def quantize(self) -> str | None:
        """The form, or None."""
        ...

    def bytes_of_weights(self) -> tuple[int, int] | None:
        """Before quantising and as held, if known."""
        ...

    def without_weights(self) -> Scorer:
        """The same, with nothing left of it in memory but what is not weights: it scores no more."""
        ...
