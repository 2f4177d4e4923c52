"""Scorers without a model, always shown beside one: length, chance, and word overlap with the profile.

Each score but that of a vote is a pure function of its own comparison, so it does not depend on order, batch or what
else is in the file. Responses with equal texts get equal scores, but for the first position.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from prb_jax.data.comparison import Comparison, Post
from prb_jax.errors import CheckpointError, DataError, quote

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
        counts = np.zeros(len(options), np.float32)
        for other in others:
            vote = ballots.votes[pair, other]
            counts += np.array([vote.get(column, 0.0) for column in options], np.float32)
        scores.append(counts if others else None)
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
            user_vote = ballots.votes.get((pair, voter), {})
            weighted: list[tuple[float, int]] = []
            for other in ballots.voters.get(pair, ()):
                place = int(np.searchsorted(others, other))
                if other == voter or place == len(others) or others[place] != other:
                    continue
                vote = ballots.votes[pair, other]
                here = sum(share * vote.get(column, 0.0) for column, share in user_vote.items())
                shared = common[place] - bool(user_vote)
                if shared > 0:
                    weighted.append(((agreed[place] - here + 1) / (shared + 2), other))
            if weighted:
                best = sorted(weighted, key=lambda entry: (-entry[0], entry[1]))[:neighbours]
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
    votes_given: dict[tuple[int, int], list[dict[int, float]]] = {}
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
            votes_given.setdefault((pair, voter), []).append({column: 1 / len(chosen) for column in chosen})
    votes = {
        place: {c: sum(vote.get(c, 0.0) for vote in all_) / len(all_) for vote in all_ for c in vote}
        for place, all_ in votes_given.items()
    }
    voters: dict[int, list[int]] = {}
    for pair, voter in sorted(votes):
        voters.setdefault(pair, []).append(voter)
    return _Ballots(pair_of, voter_of, options_of, votes, voters, len(columns), names)


def _agreements(ballots: _Ballots) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield each named user, the other voters with a common pair (sorted), on how many they agree, and how many
    there are."""
    if all(len(voters) == 1 for voters in ballots.voters.values()):
        return
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
    rows, columns, shares = (np.array(values) for values in zip(*entries, strict=True))
    votes = csr_array((shares, (rows, columns)), shape=(users, ballots.columns))
    judged = sorted((voter, pair) for pair, voter in ballots.votes if ballots.names[voter] is not None)
    rows, pairs = (np.array(values) for values in zip(*judged, strict=True))
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


FIRST: Final = "baseline:first"
PROFILE_OVERLAP: Final = "baseline:profile-overlap"
SHOWN_OVERLAP: Final = "baseline:profile-overlap-shown"
PERSONA_TRUTH: Final = "baseline:persona-truth"

_WORD: Final = re.compile(r"\w+")
_RECENT: Final = 64
"""Profiles whose words are kept for the next call: records are often in the order of their users."""


def score_baseline(name: str, comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    """Scores of a built-in baseline, one float32 [K] array per comparison.

    * ``baseline:length``: characters of the response.
    * ``baseline:shorter``: the same, negative: the shortest response wins.
    * ``baseline:first``: the first response wins. Of a pair given as chosen and rejected the place says nothing: a tie.
    * ``baseline:random``: uniform in [0, 1), from a hash of the comparison's id and the text.
    * ``baseline:profile-overlap``: cosine between the TF-IDF vectors of the response and of the
      user's whole profile, in [0, 1]; without a profile every response scores 0, a tie.
    * ``baseline:popularity`` and ``baseline:nearest-users``: votes of other users on the same prompt and responses
      among ``comparisons`` (`prb_jax.scoring.baselines`); where there are none every response scores 0, a tie.
    * ``baseline:persona-truth``: how much the response pleases the generated person, by the person's tastes, which no
      model could know (`prb_jax.sources.personas.satisfaction`): an upper bound.

    Raises:
      CheckpointError: there is no such baseline.
      DataError: for the last one, a comparison without a generated person as its user.
    """
    if (vote := VOTES.get(name)) is not None:
        nothing = (np.zeros(len(comparison.responses), np.float32) for comparison in comparisons)
        return [zeros if scores is None else scores for scores, zeros in zip(vote(comparisons), nothing)]
    score = BASELINES.get(name) or ORACLES.get(name)
    if score is None:
        raise CheckpointError(f"unknown baseline {quote(name)}; expected one of {', '.join(BASELINE_NAMES)}")
    return score(comparisons)


def _length(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    return [np.array([len(text) for text in c.responses], np.float32) for c in comparisons]


def _shorter(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    return [-scores for scores in _length(comparisons)]


def _first(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    return [
        np.zeros(2, np.float32) if c.is_pair else np.arange(len(c.responses), 0, -1, dtype=np.float32)
        for c in comparisons
    ]


def _random(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    return [np.array([_uniform(c.id, text) for text in c.responses], np.float32) for c in comparisons]


def _persona_truth(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    from prb_jax.sources.personas import satisfaction  # which makes the whole benchmark

    scores = []
    for comparison in comparisons:
        if comparison.user_id is None:
            raise DataError(
                f"comparison {quote(comparison.id)}: {PERSONA_TRUTH} knows the tastes of generated people alone; "
                "expected the user_id of one, found none"
            )
        scores.append(
            np.array([satisfaction(comparison.user_id, text) for text in comparison.responses], np.float32)
        )
    return scores


def _uniform(id: str, text: str) -> float:
    """24 hashed bits as a fraction: every value is exact in float32."""
    digest = hashlib.sha256(f"{id}\0{text}".encode()).digest()
    return int.from_bytes(digest[:3], "big") / 2**24


@dataclass(frozen=True)
class _ProfileVector:
    """TF-IDF of one profile; each post is a document of the IDF.

    ``weights`` by word, ``idf`` by word, ``unseen`` the IDF of words in no post, ``norm`` of weights.
    """

    weights: Mapping[str, float]
    idf: Mapping[str, float]
    unseen: float
    norm: float


def profile_overlap(comparisons: Sequence[Comparison], *, posts: int | None = None) -> list[np.ndarray]:
    """Return the scores of ``baseline:profile-overlap``, from the first posts of each profile or all of them."""
    vectors: dict[tuple[Post, ...], _ProfileVector] = {}  # a user's rows share one profile
    scores = []
    for comparison in comparisons:
        read = comparison.profile[:posts]
        profile = vectors.get(read)
        if profile is None:
            profile = vectors[read] = _recent_vector(read)
        scores.append(np.array([_cosine(text, profile) for text in comparison.responses], np.float32))
    return scores


@functools.lru_cache(maxsize=_RECENT)
def _recent_vector(posts: tuple[Post, ...]) -> _ProfileVector:
    return _profile_vector(posts)


def _profile_vector(posts: Sequence[Post]) -> _ProfileVector:
    documents = [_words(post.text) for post in posts]
    frequency = Counter(word for words in documents for word in words)
    document_frequency = Counter(word for words in documents for word in set(words))
    smoothed = 1 + len(documents)
    idf = {word: 1 + math.log(smoothed / (1 + df)) for word, df in document_frequency.items()}
    weights = {word: (1 + math.log(count)) * idf[word] for word, count in frequency.items()}
    return _ProfileVector(
        weights=weights, idf=idf, unseen=1 + math.log(smoothed), norm=_norm(weights.values())
    )


def _cosine(text: str, profile: _ProfileVector) -> float:
    counts = Counter(_words(text))
    weights = {
        word: (1 + math.log(count)) * profile.idf.get(word, profile.unseen) for word, count in counts.items()
    }
    norm = _norm(weights.values()) * profile.norm
    if norm == 0:
        return 0.0
    # fsum is exact, so the order of the words in the text leaves no trace in the score
    return (
        math.fsum(w * profile.weights[word] for word, w in weights.items() if word in profile.weights) / norm
    )


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


BASELINES: Final[Mapping[str, Callable[[Sequence[Comparison]], list[np.ndarray]]]] = MappingProxyType(
    {
        "baseline:length": _length,
        "baseline:shorter": _shorter,
        FIRST: _first,
        "baseline:random": _random,
        PROFILE_OVERLAP: profile_overlap,
    }
)
"""The built-in baselines that look at one comparison at a time, by name, in the order in which they are shown."""

VOTES: Final[Mapping[str, Callable[[Sequence[Comparison]], list[np.ndarray | None]]]] = MappingProxyType(
    {"baseline:popularity": popularity, "baseline:nearest-users": nearest_users}
)
"""Those that count votes of other users, None where there are none."""

ORACLES: Final[Mapping[str, Callable[[Sequence[Comparison]], list[np.ndarray]]]] = MappingProxyType(
    {PERSONA_TRUTH: _persona_truth}
)
"""Those that know what no model could: upper bounds, which stand beside no model and on no leaderboard."""

BASELINE_NAMES: Final = (*BASELINES, *VOTES, *ORACLES)
