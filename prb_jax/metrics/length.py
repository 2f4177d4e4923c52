"""Whether a scorer likes long responses: its picks and its accuracy where the longest response is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import ScoredRow, margin

LENGTH_DEFINITION: Final = (
    "over the comparisons in which one response is longer (in characters) than all others: how often the preferred "
    "response is the longest one, how often the longest one has the best score (a tie has none), and the accuracy "
    "where the preferred response is the longest and where it is not; a scorer without a bias for length is as "
    "accurate in both"
)


def length_bias(rows: Sequence[ScoredRow], lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return how the picks of a scorer go with the lengths of the responses.

    Args:
      rows: the scored comparisons.
      lengths: [K] of the responses of each row, in the same order.

    Returns:
      "n" comparisons with a longest response and "equal" without one; of the n, the shares "preferred_is_longest" and
      "picks_longest"; "n_longest" and "n_shorter" comparisons whose preferred response is or is not the longest, with
      "accuracy_longest" and "accuracy_shorter" (None where there are none).

    Raises:
      DataError: another number of lengths than of scores; and as `prb_jax.metrics.accuracy.margin`.
    """
    wins = {True: [], False: []}
    picks = equal = 0
    for row, sizes in zip(rows, lengths, strict=True):
        if len(sizes) != len(row.scores):
            raise DataError(f"row {quote(row.id)}: {len(sizes)} lengths for {len(row.scores)} scores")
        longest = max(sizes)
        if list(sizes).count(longest) > 1:
            equal += 1
            continue
        place = list(sizes).index(longest)
        others = [score for k, score in enumerate(row.scores) if k != place]
        picks += row.scores[place] > max(others)
        won = margin(row.scores, row.labels, id=row.id) > 0
        wins[row.labels[place] == max(row.labels)].append(won)
    counts = {is_longest: len(found) for is_longest, found in wins.items()}
    n = sum(counts.values())
    return {
        "n": n,
        "equal": equal,
        "preferred_is_longest": counts[True] / n if n else None,
        "picks_longest": picks / n if n else None,
        "n_longest": counts[True],
        "accuracy_longest": sum(wins[True]) / counts[True] if counts[True] else None,
        "n_shorter": counts[False],
        "accuracy_shorter": sum(wins[False]) / counts[False] if counts[False] else None,
    }
