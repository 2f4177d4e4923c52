"""Baselines without a model, always reported beside one: length, chance, word overlap with the profile, and votes.

Except for votes, each score is a pure function of one comparison: order, batch and the rest of the file do not matter.
Equal responses get equal scores, except under "baseline:first".
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import numpy as np

from prb_jax.errors import CheckpointError, DataError, RunError, quote
from prb_jax.records.comparison import Comparison, Post
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring import VOTES as VOTE_NAMES
from prb_jax.scoring.plain import PlainScorer

BaselineName = Literal[
    "baseline:length",
    "baseline:shorter",
    "baseline:first",
    "baseline:random",
    "baseline:profile-overlap",
    "baseline:popularity",
    "baseline:nearest-users",
    "baseline:persona-truth",
]
BASELINE_NAMES: Final[tuple[str, ...]] = get_args(BaselineName)

FIRST: Final = "baseline:first"
PROFILE_OVERLAP: Final = "baseline:profile-overlap"
SHOWN_OVERLAP: Final = "baseline:profile-overlap-shown"
PERSONA_TRUTH: Final = "baseline:persona-truth"

NEIGHBOURS = 5  # users who vote in `nearest_users`

_USERS_AT_ONCE = 512


@dataclass(frozen=True)
class _Ballots:
    """Votes of labelled comparisons; a pair is one prompt with one set of responses."""

    # [n] pair and voter of each comparison, and the column of each response; equal texts share a column,
    # and a comparison without a user counts as a separate voter
    rows: list[tuple[int, int, list[int]]]
    # (pair, voter) -> column -> share of the voter's preference; the shares sum to 1
    votes: dict[tuple[int, int], dict[int, float]]
    voters: dict[int, list[int]]  # pair -> its voters, sorted by name
    users: int  # number of named voters, who come first
    columns: int  # number of columns


def popularity(comparisons: Sequence[Comparison]) -> list[np.ndarray | None]:
    """Return how many other users prefer each response, float32 [K]; None if no other user judged the pair."""
    ballots = _count(comparisons)
    scores: list[np.ndarray | None] = []
    for pair, voter, options in ballots.rows:
        others = [other for other in ballots.voters.get(pair, ()) if other != voter]
        counts = np.zeros(len(options), np.float32)
        for other in others:
            vote = ballots.votes[pair, other]
            counts += np.array([vote.get(column, 0.0) for column in options], np.float32)
        scores.append(counts if others else None)
    return scores


def nearest_users(comparisons: Sequence[Comparison]) -> list[np.ndarray | None]:
    """Return the votes of the users who agree most with the user on other pairs, float32 [K].

    Another user qualifies with a vote on this pair and at least one other pair in common with the user. The
    `NEIGHBOURS` users with the highest agreement vote, and the agreement is the weight of the vote. Agreement is (pairs
    with the same vote + 1) / (common pairs + 2), without this pair. The result is None if nobody qualifies.
    """
    ballots = _count(comparisons)
    scores: list[np.ndarray | None] = [None] * len(comparisons)
    rows_of: dict[int, list[int]] = {}
    for row, (_, voter, _) in enumerate(ballots.rows):
        rows_of.setdefault(voter, []).append(row)
    for voter, agreements in _agreements(ballots):
        for row in rows_of[voter]:
            pair, _, options = ballots.rows[row]
            user_vote = ballots.votes.get((pair, voter), {})
            weighted: list[tuple[float, int]] = []
            for other in ballots.voters.get(pair, ()):
                if other == voter or other not in agreements:
                    continue
                agreed, common = agreements[other]
                vote = ballots.votes[pair, other]
                here = sum(share * vote.get(column, 0.0) for column, share in user_vote.items())
                if (shared := common - bool(user_vote)) > 0:
                    weighted.append(((agreed - here + 1) / (shared + 2), other))
            if weighted:
                best = sorted(weighted, key=lambda entry: (-entry[0], entry[1]))[:NEIGHBOURS]
                scores[row] = np.array(
                    [sum(weight * ballots.votes[pair, v].get(c, 0.0) for weight, v in best) for c in options],
                    np.float32,
                )
    return scores


def _count(comparisons: Sequence[Comparison]) -> _Ballots:
    names = sorted({c.user_id for c in comparisons if c.user_id is not None})
    number, unnamed = {name: place for place, name in enumerate(names)}, itertools.count(len(names))
    pairs: dict[object, int] = {}
    columns: dict[tuple[int, str], int] = {}
    rows: list[tuple[int, int, list[int]]] = []
    given: dict[tuple[int, int], list[dict[int, float]]] = {}
    for comparison in comparisons:
        pair = pairs.setdefault((comparison.prompt, frozenset(comparison.responses)), len(pairs))
        voter = next(unnamed) if comparison.user_id is None else number[comparison.user_id]
        options = [columns.setdefault((pair, text), len(columns)) for text in comparison.responses]
        rows.append((pair, voter, options))
        if comparison.labels is not None:
            top = max(comparison.labels)
            chosen = {column for column, label in zip(options, comparison.labels) if label == top}
            given.setdefault((pair, voter), []).append(dict.fromkeys(chosen, 1 / len(chosen)))
    votes = {
        place: {c: sum(vote.get(c, 0.0) for vote in cast) / len(cast) for vote in cast for c in vote}
        for place, cast in given.items()
    }
    voters: dict[int, list[int]] = {}
    for pair, voter in sorted(votes):
        voters.setdefault(pair, []).append(voter)
    return _Ballots(rows, votes, voters, len(names), len(columns))


def _agreements(ballots: _Ballots) -> Iterator[tuple[int, dict[int, tuple[float, float]]]]:
    """Yield each named user with a dict: other named voter -> (pairs they agree on, pairs both judged)."""
    entries = [
        (voter, pair, column, share)
        for (pair, voter), vote in ballots.votes.items()
        for column, share in vote.items()
        if voter < ballots.users
    ]
    if not entries or all(len(voters) == 1 for voters in ballots.voters.values()):
        return
    from scipy.sparse import csr_array  # scipy takes long to import

    def row_of(matrix: Any, row: int) -> Iterable[tuple[int, float]]:
        place = slice(matrix.indptr[row], matrix.indptr[row + 1])
        return zip(matrix.indices[place].tolist(), matrix.data[place].tolist())

    rows, pairs, columns, shares = (np.array(values) for values in zip(*entries, strict=True))
    votes = csr_array((shares, (rows, columns)), shape=(ballots.users, ballots.columns))
    judged = np.unique(np.stack([rows, pairs]), axis=1)
    seen = csr_array((np.ones(judged.shape[1]), judged), shape=(ballots.users, max(pairs) + 1))
    for start in range(0, ballots.users, _USERS_AT_ONCE):
        part = slice(start, min(start + _USERS_AT_ONCE, ballots.users))
        common, agreed = (seen[part] @ seen.T).tocsr(), (votes[part] @ votes.T).tocsr()
        for row in range(part.stop - part.start):
            same = dict(row_of(agreed, row))
            yield start + row, {other: (same.get(other, 0.0), n) for other, n in row_of(common, row)}


_WORD: Final = re.compile(r"\w+")
_RECENT: Final = 64
"""Size of the cache of profile vectors: records are often sorted by user."""


def score_baseline(name: str, comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    """Return the scores of a built-in baseline, one float32 [K] array per comparison.

    * ``baseline:length``: characters of the response.
    * ``baseline:shorter``: negated characters of the response, so the shortest response wins.
    * ``baseline:first``: the first response wins. A pair given as chosen and rejected is a tie: its order is the label.
    * ``baseline:random``: uniform in [0, 1), from a hash of the comparison's id and the text.
    * ``baseline:profile-overlap``: cosine between the TF-IDF vectors of the response and of the
      user's whole profile, in [0, 1]. Without a profile every response scores 0, a tie.
    * ``baseline:popularity`` and ``baseline:nearest-users``: votes of other users on the same prompt and responses
      among ``comparisons``: see :func:`popularity` and :func:`nearest_users`. Without votes every response scores 0.
    * ``baseline:persona-truth``: satisfaction of a generated person, from tastes that no model could know
      (`prb_jax.records.sources.personas.satisfaction`): an upper bound.

    Raises:
      CheckpointError: The baseline is unknown.
      DataError: A user of "baseline:persona-truth" is not a generated person.
    """
    if (vote := VOTES.get(name)) is not None:
        nothing = (np.zeros(len(comparison.responses), np.float32) for comparison in comparisons)
        return [zeros if scores is None else scores for scores, zeros in zip(vote(comparisons), nothing)]
    score = BASELINES.get(name) or ORACLES.get(name)
    if score is None:
        raise CheckpointError(f"unknown baseline {quote(name)}; expected one of {', '.join(BASELINE_NAMES)}")
    return score(comparisons)


def _each(
    score: Callable[[Comparison], Iterable[float]],
) -> Callable[[Sequence[Comparison]], list[np.ndarray]]:
    return lambda comparisons: [np.array([*score(comparison)], np.float32) for comparison in comparisons]


def _persona_truth(comparison: Comparison) -> Iterable[float]:
    if comparison.user_id is None:
        raise DataError(
            f"comparison {quote(comparison.id)}: {PERSONA_TRUTH} knows only the tastes of generated people; "
            "expected the user_id of one, found none"
        )
    personas = import_module("prb_jax.records.sources.personas")  # its import generates the whole benchmark
    return [personas.satisfaction(comparison.user_id, text) for text in comparison.responses]


def _uniform(id: str, text: str) -> float:
    """Return 24 hashed bits as a fraction: every value is exact in float32."""
    digest = hashlib.sha256(f"{id}\0{text}".encode()).digest()
    return int.from_bytes(digest[:3], "big") / 2**24


@dataclass(frozen=True)
class _ProfileVector:
    """TF-IDF vector of one profile; each post is a document of the IDF.

    ``weights`` and ``idf`` map words to numbers, ``unseen`` is the IDF of a word in no post, ``norm`` is the Euclidean
    norm of the weights.
    """

    weights: Mapping[str, float]
    idf: Mapping[str, float]
    unseen: float
    norm: float


def profile_overlap(comparisons: Sequence[Comparison], *, posts: int | None = None) -> list[np.ndarray]:
    """Return the scores of ``baseline:profile-overlap`` from the first `posts` posts of each profile, or from all."""
    vectors: dict[tuple[Post, ...], _ProfileVector] = {}  # a user's rows share one profile
    scores = []
    for comparison in comparisons:
        read = comparison.profile[:posts]
        profile = vectors.get(read) or vectors.setdefault(read, _profile_vector(read))
        scores.append(np.array([_cosine(text, profile) for text in comparison.responses], np.float32))
    return scores


@functools.lru_cache(maxsize=_RECENT)
def _profile_vector(posts: tuple[Post, ...]) -> _ProfileVector:
    documents = [words_of(post.text) for post in posts]
    frequency = Counter(word for words in documents for word in words)
    document_frequency = Counter(word for words in documents for word in set(words))
    smoothed = 1 + len(documents)
    idf = {word: 1 + math.log(smoothed / (1 + df)) for word, df in document_frequency.items()}
    weights = {word: (1 + math.log(count)) * idf[word] for word, count in frequency.items()}
    return _ProfileVector(weights, idf, unseen=1 + math.log(smoothed), norm=_norm(weights.values()))


def _cosine(text: str, profile: _ProfileVector) -> float:
    weights = {
        word: (1 + math.log(count)) * profile.idf.get(word, profile.unseen)
        for word, count in Counter(words_of(text)).items()
    }
    norm = _norm(weights.values()) * profile.norm
    if norm == 0:
        return 0.0
    # fsum is exact, so the score does not depend on the order of the words
    common = (w * profile.weights[word] for word, w in weights.items() if word in profile.weights)
    return math.fsum(common) / norm


def words_of(text: str) -> list[str]:
    """Return the case-folded words of a text: runs of letters, digits and underscores."""
    return _WORD.findall(text.casefold())


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


BASELINES: Final[Mapping[str, Callable[[Sequence[Comparison]], list[np.ndarray]]]] = MappingProxyType(
    {
        "baseline:length": _each(lambda c: [len(text) for text in c.responses]),
        "baseline:shorter": _each(lambda c: [-float(len(text)) for text in c.responses]),
        FIRST: _each(lambda c: (0, 0) if c.is_pair else range(len(c.responses), 0, -1)),
        "baseline:random": _each(lambda c: [_uniform(c.id, text) for text in c.responses]),
        PROFILE_OVERLAP: profile_overlap,
    }
)
"""Built-in baselines that read one comparison at a time, by name, in the order of the tables."""

VOTES: Final[Mapping[str, Callable[[Sequence[Comparison]], list[np.ndarray | None]]]] = MappingProxyType(
    dict(zip(VOTE_NAMES, (popularity, nearest_users), strict=True))
)
"""Baselines that count votes of other users; the scores of a comparison without votes are None."""

ORACLES: Final = MappingProxyType({PERSONA_TRUTH: _each(_persona_truth)})
"""Oracles: upper bounds, never ranked with models."""


def baseline_scorer(name: str) -> PlainScorer:
    """Return the scorer of a built-in baseline.

    Raises:
      RunError: The baseline is unknown.
    """
    if name not in BASELINE_NAMES:
        raise RunError(f"unknown baseline {quote(name)}; there are {', '.join(BASELINE_NAMES)}")
    facts = {UPPER_BOUND: name} if name in ORACLES else {}
    return PlainScorer(name, functools.partial(score_baseline, name), facts, one_by_one=False)
