"""The trees of a planned batch."""

from __future__ import annotations

from dataclasses import dataclass

from prb_jax.models.named_shapes import QUESTION_TOKENS
from prb_jax.trees.mask import TreeLayout


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """B trees of P prefix tokens and K responses of R tokens: all of them real in the estimate.

    Attributes:
      batch, prefix, responses, response_length: B, P, K, R.
      questions_per_user: so many trees in a row begin with the same profile, which the question of
        :data:`prb_jax.models.named_shapes.QUESTION_TOKENS` follows in each.
      spread: of training over packed streams: the standard deviation of the logarithm of the prefixes' lengths, of
        which P is the median then; half of it is that of the responses.
    """

    batch: int
    prefix: int
    responses: int
    response_length: int
    questions_per_user: int = 1
    spread: float = 0.0

    def shared(self, rows: int) -> tuple[int, ...]:
        """Return how many tokens each of the first rows begins with that the row before has too."""
        profile = max(0, self.prefix - QUESTION_TOKENS)
        return tuple(profile if row % self.questions_per_user else 0 for row in range(rows))

    @property
    def tokens(self) -> int:
        """Of one tree."""
        return self.layout.tokens

    @property
    def layout(self) -> TreeLayout:
        """Of one tree."""
        return TreeLayout(self.prefix, self.responses, self.response_length)
