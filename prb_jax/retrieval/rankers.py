"""Rankings of posts: BM25 by the question, recency, and the embeddings of an encoder, as Contriever's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from prb_jax.data import fields
from prb_jax.readouts.text_encoder import TextEncoder
from prb_jax.runs.progress import Count, show_progress

K1: Final = 1.5

B: Final = 0.75

_WORD: Final = re.compile(r"\w+")


@dataclass(frozen=True)
class Query:
    """One profile to be ranked.

    Attributes:
      where: what error messages start with.
      question: by which it is ranked.
      posts: as they stand in the record, each with at least a "text".
    """

    where: str
    question: str
    posts: Sequence[Mapping[str, Any]]


Ranker = Callable[[Iterable[Query]], list[list[int]]]

"""For each query all positions of its posts, the best one first; equal ones keep their order."""


def bm25(queries: Iterable[Query]) -> list[list[int]]:
    """Okapi BM25 (Robertson and Zaragoza, 2009) of each post for the question; the profile is the collection.

    A question's word that is in df of N posts, f times in a post of L words where posts have A on
    average, adds ``ln(1 + (N - df + 0.5) / (df + 0.5)) * f * (K1 + 1) / (f + K1 * (1 - B + B * L / A))``.
    Words are runs of letters, digits and underscores, without regard to case.
    """
    collections: dict[tuple[str, ...], _Collection] = {}  # the records of one user share a profile
    orders = []
    for query in queries:
        texts = tuple(post["text"] for post in query.posts)
        collection = collections.get(texts)
        if collection is None:
            collection = collections[texts] = _collection(texts)
        orders.append(best_first(_scores(query.question, collection)))
    return orders


def recency(queries: Iterable[Query]) -> list[list[int]]:
    """The newest post first: by "date" where every post of a profile has one, else the last one first.

    Dates are numbers, or texts that sort as their dates do (ISO 8601).

    Raises:
      DataError: for a profile whose posts have dates of both kinds, or of another one.
    """
    return [best_first(_ages(query)) for query in queries]


RANKERS: Final[Mapping[str, Ranker]] = MappingProxyType({"bm25": bm25, "recency": recency})


@dataclass(frozen=True)
class _Collection:
    """Word counts and length of each post; the number of posts that hold a word; the mean length."""

    counts: Sequence[Counter[str]]
    lengths: Sequence[int]
    holders: Counter[str]
    mean_length: float


def _collection(texts: Sequence[str]) -> _Collection:
    words = [_words(text) for text in texts]
    return _Collection(
        counts=[Counter(each) for each in words],
        lengths=[len(each) for each in words],
        holders=Counter(word for each in words for word in set(each)),
        mean_length=sum(map(len, words)) / len(words) if words else 0.0,
    )


def _scores(question: str, collection: _Collection) -> list[float]:
    number = len(collection.counts)
    asked = [word for word in _words(question) if word in collection.holders]
    weights = {
        word: math.log(1 + (number - collection.holders[word] + 0.5) / (collection.holders[word] + 0.5))
        for word in asked
    }
    scores = []
    for counts, length in zip(collection.counts, collection.lengths):
        norm = K1 * (1 - B + B * length / collection.mean_length) if collection.mean_length else K1
        scores.append(
            math.fsum(weights[word] * counts[word] * (K1 + 1) / (counts[word] + norm) for word in asked)
        )
    return scores


def _ages(query: Query) -> Sequence[Any]:
    """What grows with the date of each post."""
    dates = [post.get("date") for post in query.posts]
    if not dates or any(date is None for date in dates):
        return range(len(dates))
    kind = str if isinstance(dates[0], str) else (int, float)
    for position, date in enumerate(dates):
        if not isinstance(date, kind) or isinstance(date, bool):
            expected = "a text, as the first post has" if kind is str else "a number"
            fields.fail(
                query.where, f"profile[{position}].date", f"expected {expected}, found {fields.found(date)}"
            )
    return dates


def best_first(values: Sequence[Any]) -> list[int]:
    """Positions of the values, the largest first; equal ones keep their order."""
    # stable in both directions: reverse=True keeps the order of equal values
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


@dataclass(frozen=True)
class SimilarityRanking:
    """Rankings of posts.

    Attributes:
      orders: for each query all positions of its posts, the best one first; equal ones keep their order.
      texts: distinct texts, questions and posts, that were embedded.
      truncated: of these, how many lost their end because they are too long for the encoder.
      tokens: real tokens of these texts, after the cut.
      padded_tokens: tokens computed.
    """

    orders: list[list[int]]
    texts: int
    truncated: int
    tokens: int
    padded_tokens: int


def rank_by_similarity(
    queries: Sequence[Query], encoder: TextEncoder, *, progress: bool = False
) -> SimilarityRanking:
    """Orders each query's posts by the dot product of their vectors with the question's.

    Each distinct text is embedded once, however many users and questions it belongs to. A query without
    posts costs nothing. ``progress`` shows how many texts are embedded.
    """
    places: dict[str, int] = {}
    asked = [query for query in queries if query.posts]
    for query in asked:
        for text in (query.question, *(post["text"] for post in query.posts)):
            places.setdefault(text, len(places))
    count = Count(len(places), unit="texts")
    with show_progress(f"embedding with {encoder.name}", count, enabled=progress) as display:
        embedded = encoder.embed(list(places), advance=display.advance)
    orders = []
    for query in queries:
        if not query.posts:
            orders.append([])
            continue
        own = np.asarray([places[post["text"]] for post in query.posts])
        # One product for equal texts: in a matrix product their rows could differ in the last bit.
        distinct, inverse = np.unique(own, return_inverse=True)
        scores = embedded.vectors[distinct] @ embedded.vectors[places[query.question]]
        orders.append(best_first(scores[inverse].tolist()))
    return SimilarityRanking(
        orders, len(places), int(embedded.truncated.sum()), embedded.tokens, embedded.padded_tokens
    )
