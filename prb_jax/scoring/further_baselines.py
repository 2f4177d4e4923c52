"""Baselines that need more than one comparison at a time, or the view of the model that they stand beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.scoring.baselines import SHOWN_OVERLAP, VOTES, profile_overlap
from prb_jax.scoring.facts import Facts
from prb_jax.sources.large import LargeComparisons

_NO_VOTES: Final = (
    "no two users judge the same responses to the same prompt, or too few of them judge another pair"
)


def further_baselines(
    comparisons: Sequence[Comparison], facts: Facts, *, posts: int | None
) -> dict[str, list[ScoredRow] | str]:
    """Return the rows of further baselines by name, or why one says nothing of the comparisons.

    The votes of other users have rows only for the comparisons that other users judge too. "baseline:profile-overlap-
    shown" is there where the model sees some posts of a profile and not all of them.

    Args:
      comparisons: of the run.
      facts: of them.
      posts: how many posts of a profile the model sees; None for a scorer that sees everything.
    """
    if isinstance(comparisons, LargeComparisons):
        reason = "the data are read by windows, and the votes of other users need them at once"
        return dict.fromkeys(VOTES, reason)
    found: dict[str, list[ScoredRow] | str] = {}
    if posts and any(len(comparison.profile) > posts for comparison in comparisons):
        found[SHOWN_OVERLAP] = _rows(facts, profile_overlap(comparisons, posts=posts))
    for name, votes in VOTES.items():
        found[name] = _rows(facts, votes(comparisons)) or _NO_VOTES
    return found


def _rows(facts: Facts, scores: Sequence[np.ndarray | None]) -> list[ScoredRow]:
    return [facts.row(index, found.tolist()) for index, found in enumerate(scores) if found is not None]
