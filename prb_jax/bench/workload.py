"""What is timed: trees of random tokens with the lengths of personalised data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prb_jax.trees.tree import Tree, build_tree

PREFIX_SPREAD = 0.35
"""Standard deviation of the logarithm of prefix lengths: ten-post profiles differ by a factor of two."""

RESPONSE_SPREAD = 0.25


@dataclass(frozen=True)
class Workload:
    """Comparisons as token ids.

    Attributes:
      name: what is shown.
      trees: one a comparison.
    """

    name: str
    trees: tuple[Tree, ...]

    @property
    def responses(self) -> int:
        """Responses over all trees."""
        return sum(len(tree.responses) for tree in self.trees)

    @property
    def tokens(self) -> int:
        """Tokens that a tree needs, over all trees."""
        return sum(tree.tokens for tree in self.trees)


def synthetic_workload(
    count: int,
    *,
    responses: int,
    prefix_tokens: int,
    response_tokens: int,
    vocab_size: int,
    longest: int,
    seed: int = 0,
) -> Workload:
    """Random ids; lengths lognormal with the given means, at most ``longest`` for a conversation.

    Args:
      count: trees.
      responses: K.
      prefix_tokens, response_tokens: mean lengths.
      vocab_size: ids are drawn from the upper part of 0..vocab_size - 1.
      longest: most tokens of a prefix with one response.
      seed: of lengths and ids.
    """
    rng = np.random.default_rng(seed)
    low = min(10, vocab_size // 2)

    def lengths(size: int, mean: int, spread: float, most: int) -> np.ndarray:
        drawn = rng.lognormal(0.0, spread, size)
        # Few draws have a mean of their own: scaled to the one asked for.
        return np.clip(np.round(drawn * (mean / drawn.mean())), 2, most).astype(int)

    most_response = min(4 * response_tokens, longest // 2)
    prefixes = lengths(count, prefix_tokens, PREFIX_SPREAD, longest - most_response)
    trees = []
    for prefix in prefixes:
        shared = rng.integers(low, vocab_size, prefix)
        each = lengths(responses, response_tokens, RESPONSE_SPREAD, most_response)
        ids = [rng.integers(low, vocab_size, n) for n in each]
        for number, response in enumerate(ids):
            # Neighbours differ in their first token, so the prefix is exactly the shared part.
            response[0] = number % 2
        trees.append(build_tree([np.concatenate([shared, response]) for response in ids]))
    return Workload(f"K={responses}, {prefix_tokens}+{response_tokens} tokens", tuple(trees))
