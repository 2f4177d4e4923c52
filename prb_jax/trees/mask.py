"""Who sees whom in a tree: the one statement of it that every implementation of attention keeps to.

The tokens of a tree lie as ``[prefix | response 1 | ... | response K]`` in ``T = P + K * R`` indices:
the prefix right-aligned in P, every response left-aligned in its R. A token sees itself and what comes
before it in the prefix and in its own response, never a sibling. Because prefix and responses meet at a
fixed index, the distance between two tokens that see each other is static, and so are causality and
sliding windows. Only the padding on the left of the prefix is dynamic; padding on the right of a
response is hidden from real tokens by causality.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TreeLayout:
    """The static shape of a batch of trees: P prefix tokens, K responses, R tokens each."""

    prefix: int
    responses: int
    response_length: int

    @property
    def tokens(self) -> int:
        """T = P + K * R."""
        return self.prefix + self.responses * self.response_length

    def inside(self, index: Any) -> Any:
        """How many tokens of its own response come before the token at ``index``; 0 in the prefix.

        Args:
            index: integers, of NumPy or JAX.
        """
        return (index >= self.prefix) * ((index - self.prefix) % self.response_length)


@dataclasses.dataclass(frozen=True)
class TreeMask:
    """Which keys a query sees, padding apart.

    Attributes:
        layout: static shape of the trees.
        window: a token sees only this many last tokens of its conversation, itself included; None for all.
    """

    layout: TreeLayout
    window: int | None = None

    def sees(self, query: Any, key: Any, inside: Any = None) -> Any:
        """Whether the token at index ``query`` sees the one at ``key``: bool, of the broadcast shape.

        Args:
            query, key: integers, of NumPy, JAX, or inside a kernel.
            inside: ``layout.inside(query)`` where that is at hand: kernels have no cheap remainder.
        """
        prefix = self.layout.prefix
        inside = self.layout.inside(query) if inside is None else inside
        in_prefix = key < prefix
        visible = (key <= query) & (in_prefix | (key >= query - inside))
        if self.window is None:
            return visible
        # From a response, the prefix ends where the response begins.
        back = query - key
        skipped = (query >= prefix) & in_prefix
        return visible & (back - skipped * (query - prefix - inside) < self.window)
