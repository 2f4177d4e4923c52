"""The trees of a planned batch."""

from __future__ import annotations

from dataclasses import dataclass

from prb_jax.trees.mask import TreeLayout


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """B trees of P prefix tokens and K responses of R tokens: all of them real in the estimate.

    Attributes:
      batch, prefix, responses, response_length: B, P, K, R.
    """

    batch: int
    prefix: int
    responses: int
    response_length: int

    @property
    def tokens(self) -> int:
        """Of one tree."""
        return self.layout.tokens

    @property
    def layout(self) -> TreeLayout:
        """Of one tree."""
        return TreeLayout(self.prefix, self.responses, self.response_length)
