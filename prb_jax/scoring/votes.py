"""Baselines of votes: other users' preferences on the same prompt and responses.

Where several users judge the same responses, much of what looks like knowledge of a user may be common taste. These
baselines read no text. The votes of a user, and on the other rows all that the user said of the same responses, never
enter that user's own scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.data.comparison import Comparison

NEIGHBOURS = 5
"""Users who vote in `nearest_users`."""

_USERS_AT_ONCE = 512


@dataclass(frozen=True)
class _Ballots:
    """The votes of comparisons with labels; a pair is one prompt with one set of responses.

    Attributes:
      pair, voter: [n] of each comparison; a comparison without a user is a voter of its own.
      options: [n] the column of each of its responses; equal texts share one.
      votes: by (pair, voter), the share of the voter's preference by column; the shares are 1 together.
      voters: by pair, who voted, in the order of their names.
      columns: how many there are.
      names: of the voters; None for one without a name.
    """

    pair: list[int]
    voter: list[int]
    options: list[list[int]]
    votes: dict[tuple[int, int], dict[int, float]]
    voters: dict[int, list[int]]
    columns: int
    names: list[str | None]


def popularity(comparisons: Sequence[Comparison]) -> list[np.ndarray | None]:
    """Return how many other users prefer each response, float32 [K]; None where no other user judged the pair."""
    ballots = _count(comparisons)
    scores: list[np.ndarray | None] = []
    for pair, voter, options in zip(ballots.pair, ballots.voter, ballots.options, strict=True):
        others = [other for other in ballots.voters.get(pair, ()) if other != voter]
        found = np.zeros(len(options), np.float32)
        for other in others:
            vote = ballots.votes[pair, other]
            found += np.array([vote.get(column, 0.0) for column in options], np.float32)
        scores.append(found if others else None)
    return scores


def nearest_users(
    comparisons: Sequence[Comparison], *, neighbours: int = NEIGHBOURS
) -> list[np.ndarray | None]:
    """Return the votes of the users who agree most with the user on other pairs, float32 [K].

    Among the other users who judged the pair, and at least one other pair that the user judged too, those with the
    highest agreement vote, each with the weight of the agreement: (pairs with the same vote + 1) / (common pairs + 2),
    without the pair in question. None where there is no such user.
    """
    ballots = _count(comparisons)
    scores: list[np.ndarray | None] = [None] * len(comparisons)
    rows_of: dict[int, list[int]] = {}
    for row, voter in enumerate(ballots.voter):
        if ballots.names[voter] is not None:
            rows_of.setdefault(voter, []).append(row)
    for voter, others, agreed, common in _agreements(ballots):
        for row in rows_of.get(voter, ()):
            pair, options = ballots.pair[row], ballots.options[row]
            own = ballots.votes.get((pair, voter), {})
            found: list[tuple[float, int]] = []
            for other in ballots.voters.get(pair, ()):
                place = int(np.searchsorted(others, other))
                if other == voter or place == len(others) or others[place] != other:
                    continue
                vote = ballots.votes[pair, other]
                here = sum(share * vote.get(column, 0.0) for column, share in own.items())
                shared = common[place] - bool(own)
                if shared > 0:
                    found.append(((agreed[place] - here + 1) / (shared + 2), other))
            if found:
                best = sorted(found, key=lambda each: (-each[0], each[1]))[:neighbours]
                scores[row] = np.array(
                    [sum(weight * ballots.votes[pair, v].get(c, 0.0) for weight, v in best) for c in options],
                    np.float32,
                )
    return scores


def _count(comparisons: Sequence[Comparison]) -> _Ballots:
    names: list[str | None] = [*sorted({c.user_id for c in comparisons if c.user_id is not None})]
    number = {name: place for place, name in enumerate(names)}
    pairs: dict[object, int] = {}
    columns: dict[tuple[int, str], int] = {}
    pair_of, voter_of, options_of = [], [], []
    given: dict[tuple[int, int], list[dict[int, float]]] = {}
    for comparison in comparisons:
        key = (comparison.prompt, frozenset(comparison.responses))
        pair = pairs.setdefault(key, len(pairs))
        if comparison.user_id is None:
            names.append(None)
        voter = len(names) - 1 if comparison.user_id is None else number[comparison.user_id]
        options = [columns.setdefault((pair, text), len(columns)) for text in comparison.responses]
        pair_of.append(pair)
        voter_of.append(voter)
        options_of.append(options)
        if comparison.labels is not None:
            top = max(comparison.labels)
            chosen = {column for column, label in zip(options, comparison.labels) if label == top}
            given.setdefault((pair, voter), []).append({column: 1 / len(chosen) for column in chosen})
    votes = {
        place: {c: sum(vote.get(c, 0.0) for vote in all_) / len(all_) for vote in all_ for c in vote}
        for place, all_ in given.items()
    }
    voters: dict[int, list[int]] = {}
    for pair, voter in sorted(votes):
        voters.setdefault(pair, []).append(voter)
    return _Ballots(pair_of, voter_of, options_of, votes, voters, len(columns), names)


def _agreements(ballots: _Ballots) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield each named user, the other voters with a common pair (sorted), on how many they agree, and how many
    there are."""
    from scipy.sparse import csr_array  # scipy takes long to import

    entries = [
        (voter, column, share)
        for (_, voter), vote in sorted(ballots.votes.items())
        for column, share in vote.items()
        if ballots.names[voter] is not None
    ]
    users = sum(name is not None for name in ballots.names)
    if not entries:
        return
    rows, columns, shares = (np.array(each) for each in zip(*entries, strict=True))
    votes = csr_array((shares, (rows, columns)), shape=(users, ballots.columns))
    judged = sorted((voter, pair) for pair, voter in ballots.votes if ballots.names[voter] is not None)
    rows, pairs = (np.array(each) for each in zip(*judged, strict=True))
    seen = csr_array((np.ones(len(rows)), (rows, pairs)), shape=(users, max(pairs) + 1))
    for start in range(0, users, _USERS_AT_ONCE):
        part = slice(start, min(start + _USERS_AT_ONCE, users))
        common, agreed = (seen[part] @ seen.T).tocsr(), (votes[part] @ votes.T).tocsr()
        common.sort_indices()
        for row in range(part.stop - part.start):
            others = common.indices[common.indptr[row] : common.indptr[row + 1]]
            counts = common.data[common.indptr[row] : common.indptr[row + 1]]
            same = dict(
                zip(
                    agreed.indices[agreed.indptr[row] : agreed.indptr[row + 1]].tolist(),
                    agreed.data[agreed.indptr[row] : agreed.indptr[row + 1]].tolist(),
                )
            )
            yield start + row, others, np.array([same.get(other, 0.0) for other in others.tolist()]), counts
