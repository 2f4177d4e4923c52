"""Scorers without a model, always shown beside one: length, chance, and word overlap with the profile.

Each score is a pure function of its own comparison, so it does not depend on order, batch or what
else is in the file. Responses with equal texts get equal scores.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from prb_jax.data.comparison import Comparison, Post
from prb_jax.errors import CheckpointError, quote
from prb_jax.metrics.accuracy import ScoredRow

PROFILE_OVERLAP: Final = "baseline:profile-overlap"

_WORD: Final = re.compile(r"\w+")


def score_baseline(name: str, comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    """Scores of a built-in baseline, one float32 [K] array per comparison.

    * ``baseline:length``: characters of the response.
    * ``baseline:random``: uniform in [0, 1), from a hash of the comparison's id and the text.
    * ``baseline:profile-overlap``: cosine between the TF-IDF vectors of the response and of the
      user's whole profile, in [0, 1]; without a profile every response scores 0, a tie.

    Raises:
      CheckpointError: for a name that is not in ``BASELINES``.
    """
    score = BASELINES.get(name)
    if score is None:
        raise CheckpointError(f"unknown baseline {quote(name)}; expected one of {', '.join(BASELINES)}")
    return score(comparisons)


def where_defined(
    baselines: Mapping[str, Sequence[ScoredRow]],
) -> dict[str, Sequence[ScoredRow] | str]:
    """Return the rows of each baseline, or why it says nothing of the comparisons."""
    found: dict[str, Sequence[ScoredRow] | str] = dict(baselines)
    overlap = baselines.get(PROFILE_OVERLAP)
    if overlap is not None and not any(any(row.scores) for row in overlap):
        found[PROFILE_OVERLAP] = "no response shares a word with a profile"
    return found


def _length(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    return [np.array([len(text) for text in c.responses], np.float32) for c in comparisons]


def _random(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    return [np.array([_uniform(c.id, text) for text in c.responses], np.float32) for c in comparisons]


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


def _profile_overlap(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    vectors: dict[tuple[Post, ...], _ProfileVector] = {}  # a user's rows share one profile
    scores = []
    for comparison in comparisons:
        profile = vectors.get(comparison.profile)
        if profile is None:
            profile = vectors[comparison.profile] = _profile_vector(comparison.profile)
        scores.append(np.array([_cosine(text, profile) for text in comparison.responses], np.float32))
    return scores


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
        "baseline:random": _random,
        PROFILE_OVERLAP: _profile_overlap,
    }
)
"""The built-in baselines by name, in the order in which they are shown."""
