"""Rows of every baseline of a run, or the reason why a baseline is undefined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from prb_jax.metrics.rows import ScoredRow
from prb_jax.scoring.baselines import BASELINES, FIRST, PROFILE_OVERLAP, SHOWN_OVERLAP, VOTES, profile_overlap
from prb_jax.scoring.inputs import ComparisonTable, Job
from prb_jax.scoring.large_table import LargeTable, Lazy
from prb_jax.scoring.summary import BASELINE_ROWS

_WITHOUT_SCORES: Final = {
    PROFILE_OVERLAP: "no response shares a word with a profile",
    FIRST: "the responses are given as chosen and rejected, so that their places say nothing",
}
_VOTES_OF_LARGE_DATA: Final = "the data are read by windows, and the votes of other users need them at once"
_NO_VOTES: Final = (
    "no two users judge the same responses to the same prompt, or too few of them judge another pair"
)


def all_baselines(job: Job) -> BASELINE_ROWS:
    """Return the rows of each baseline by name, or the reason why the baseline is undefined.

    Vote baselines have rows only for comparisons that other users judge too. "baseline:profile-overlap-shown" is
    included if the model sees only some posts of a profile.
    """
    comparisons, table = job.inputs.comparisons, job.table
    baselines: dict[str, Sequence[ScoredRow] | str] = {}
    for name, rows in _of_all(job).items():
        says_nothing = name in _WITHOUT_SCORES and not any(any(row.scores) for row in rows)
        baselines[name] = _WITHOUT_SCORES[name] if says_nothing else rows
    if not comparisons.in_memory:
        return baselines | dict.fromkeys(VOTES, _VOTES_OF_LARGE_DATA)
    posts = None if job.scorer.reader is None else job.view.profile_posts
    if posts and any(len(comparison.profile) > posts for comparison in comparisons):
        baselines[SHOWN_OVERLAP] = _rows(table, profile_overlap(comparisons, posts=posts))
    for name, votes in VOTES.items():
        baselines[name] = _rows(table, votes(comparisons)) or _NO_VOTES
    return baselines


def _of_all(job: Job) -> Mapping[str, Sequence[ScoredRow]]:
    """Return the rows of each baseline that needs no votes; a table of large data has their scores."""
    table = job.table
    if isinstance(table, LargeTable):
        return table.baselines()

    def rows(scores: Sequence[np.ndarray]) -> Sequence[ScoredRow]:
        return Lazy(scores.__len__, lambda index: table.row(index, scores[index].tolist()))

    return {name: rows(score(job.inputs.comparisons)) for name, score in BASELINES.items()}


def _rows(table: ComparisonTable, scores: Sequence[np.ndarray | None]) -> list[ScoredRow]:
    return [table.row(index, row.tolist()) for index, row in enumerate(scores) if row is not None]
