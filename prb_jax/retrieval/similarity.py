"""Rankings by the embeddings of an encoder, as Contriever's: the dot product of question and post."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.readouts.text_encoder import TextEncoder
from prb_jax.retrieval.rankers import Query, best_first
from prb_jax.runs.progress import Count, show_progress


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
