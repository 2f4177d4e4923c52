"""A judge's votes on two responses, which it sees in both orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_Z: Final = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


def vote_share(counts: Sequence[tuple[int, int]]) -> tuple[float, list[float] | None]:
    """Return the share of votes for a response, the mean over orders, and its 95 % interval.

    The interval combines Wilson's interval of each order ("method of variance estimates recovery": Zou and Donner,
    Statistics in Medicine 2008). It shows how much the share could differ with other draws of the same judge.

    Args:
      counts: Votes for the response, and all readable votes, for each order.

    Returns:
      Share and interval; 0.5 and no interval if an order has no readable vote: this is a tie.
    """
    if not all(total for _, total in counts):
        return 0.5, None
    shares = [votes / total for votes, total in counts]
    share = sum(shares) / len(shares)
    ends = [_wilson(*pair) for pair in counts]
    below = math.hypot(*(one - low for one, (low, _) in zip(shares, ends, strict=True))) / len(shares)
    above = math.hypot(*(high - one for one, (_, high) in zip(shares, ends, strict=True))) / len(shares)
    return share, [share - below, share + above]


def _wilson(votes: int, total: int) -> tuple[float, float]:
    share, spread = votes / total, _Z**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
