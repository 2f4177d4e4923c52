"""`prb rank-profiles`: write the same records with each user's posts sorted by relevance.

Posts are ranked by BM25 of the question, by recency, or by the embeddings of an encoder, e.g. Contriever.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from prb_jax.errors import DataError, RunError, quote
from prb_jax.records import fields
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
from prb_jax.records.sources.whole import source_rows
from prb_jax.records.writing import temporary_name, write_once
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.baselines import words_of
from prb_jax.text.view import TextProtocol, parse_protocol

if TYPE_CHECKING:
    from prb_jax.models.readouts.text_encoder import TextEncoder

SUFFIXES = (".jsonl", ".jsonl.gz")

K1: Final = 1.5
B: Final = 0.75


@dataclass(frozen=True)
class Query:
    """One profile to rank."""

    where: str  # start of error messages
    question: str  # question to rank the posts for
    posts: Sequence[Mapping[str, Any]]  # posts as in the record, each with at least a "text"


Ranker = Callable[[Iterable[Query]], list[list[int]]]
"""Returns, for each query, all positions of its posts, the best first; equal posts keep their order."""


def bm25(queries: Iterable[Query]) -> list[list[int]]:
    """Rank posts by Okapi BM25 (Robertson and Zaragoza, 2009) for the question; the profile is the collection.

    A word of the question that is in df of N posts, f times in a post of L words, with an average post length A, adds
    ``ln(1 + (N - df + 0.5) / (df + 0.5)) * f * (K1 + 1) / (f + K1 * (1 - B + B * L / A))``.
    Words are runs of letters, digits and underscores, case-insensitive.
    """
    collections: dict[tuple[str, ...], tuple[list[Counter[str]], Counter[str]]] = {}
    orders = []
    for query in queries:
        texts = tuple(post["text"] for post in query.posts)
        if texts not in collections:  # the records of one user share a profile
            counts = [Counter(words_of(text)) for text in texts]
            collections[texts] = counts, Counter(word for count in counts for word in count)
        counts, holders = collections[texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        asked = [word for word in words_of(query.question) if word in holders]
        weights = {
            word: math.log(1 + (len(texts) - holders[word] + 0.5) / (holders[word] + 0.5)) for word in asked
        }
        scores = []
        for count, length in zip(counts, lengths):
            norm = K1 * (1 - B + B * length / mean) if mean else K1
            parts = (weights[word] * count[word] * (K1 + 1) / (count[word] + norm) for word in asked)
            scores.append(math.fsum(parts))
        orders.append(best_first(scores))
    return orders


def recency(queries: Iterable[Query]) -> list[list[int]]:
    """Rank the newest post first: by "date" if every post of a profile has one, else in reverse order.

    Dates are numbers, or texts that sort chronologically (ISO 8601).

    Raises:
      DataError: posts of a profile mix both kinds of dates, or have another type.
    """
    return [best_first(_ages(query)) for query in queries]


RANKERS: Final[Mapping[str, Ranker]] = MappingProxyType({"bm25": bm25, "recency": recency})


def _ages(query: Query) -> Sequence[Any]:
    """Return a sort key that grows with the date of each post."""
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
    """Return the positions of the values, the largest first; equal values keep their order."""
    # stable in both directions: reverse=True keeps the order of equal values
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)


@dataclass(frozen=True)
class SimilarityRanking:
    """Rankings of posts."""

    # for each query all positions of its posts, the best first; equal posts keep their order
    orders: list[list[int]]
    texts: int  # number of distinct embedded texts, questions and posts
    truncated: int  # number of these texts whose end was cut for the encoder
    tokens: int  # real tokens of these texts, after the cut
    padded_tokens: int  # computed tokens, including padding


def rank_by_similarity(
    queries: Sequence[Query], encoder: TextEncoder, *, progress: bool = False
) -> SimilarityRanking:
    """Order each query's posts by the dot product of their vectors with the question's vector.

    Each distinct text is embedded once, however many users and questions share it. A query without posts costs nothing.
    ``progress`` shows the number of embedded texts.
    """
    asked = [query for query in queries if query.posts]
    texts = dict.fromkeys(text for q in asked for text in (q.question, *(post["text"] for post in q.posts)))
    places = {text: place for place, text in enumerate(texts)}
    count = Count(len(places), unit="texts")
    with show_progress(f"embedding with {encoder.name}", count, enabled=progress) as display:
        embedded = encoder.embed(list(places), advance=display.advance)
    orders = []
    for query in queries:
        if not query.posts:
            orders.append([])
            continue
        post_places = np.asarray([places[post["text"]] for post in query.posts])
        # Compute each distinct text once: rows of a matrix product with equal texts could differ in the last bit.
        distinct, inverse = np.unique(post_places, return_inverse=True)
        scores = embedded.vectors[distinct] @ embedded.vectors[places[query.question]]
        orders.append(best_first(scores[inverse].tolist()))
    return SimilarityRanking(
        orders, len(places), int(embedded.truncated.sum()), embedded.tokens, embedded.padded_tokens
    )


@dataclass(frozen=True)
class Ranked:
    """The result of `rank_profiles`.

    Attributes:
      path: Output file.
      records: Number of records in the file.
      profiles: Number of records with a profile.
      texts: Number of distinct questions and posts that an encoder embedded; 0 for rankers without encoder.
      truncated: Number of these texts whose end was cut for the encoder.
    """

    path: Path
    records: int
    profiles: int
    texts: int = 0
    truncated: int = 0


def rank_profiles(
    data: str | Path,
    *,
    encoder: str,
    out: str | Path,
    protocol: str = TextProtocol.DEFAULT,
    mesh: str | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Ranked:
    """Write the records of ``data`` with their profiles reordered, most relevant post first.

    The field "profile_order" records the ranking. Every other field is unchanged, including fields outside the schema
    in JSON files.

    Args:
      data: A file, or any other source of ``read_comparisons``.
      encoder: "bm25", "recency", or a model: a folder or hub id of an encoder, e.g. Contriever.
      out: Output file, JSON lines, optionally gzipped; a file with other contents is never replaced.
      protocol: "default"; or "paper", which follows the ranking script of Personalised RewardBench:
        the i-th post gets category and text of the i-th best one, but keeps its own id.
      mesh, dtype, max_length, revision: Options of :func:`prb_jax.models.readouts.text_encoder.load_text_encoder`.
      progress: Show progress on standard error.

    Raises:
      DataError: a record has the wrong format, or an option does not apply to the encoder.
      CheckpointError, MeshError: the model cannot be loaded.
      RunError: ``out`` already exists with other contents, or cannot be written.
    """
    options = {"mesh": mesh, "dtype": dtype, "max_length": max_length, "revision": revision}
    given, is_path = [name for name, value in options.items() if value is not None], Path(encoder).exists()
    if encoder in RANKERS and given:
        raise DataError(f"{', '.join(given)}: for encoders that are models, not for {encoder}")
    if not (encoder in RANKERS or "/" in encoder or is_path):
        raise DataError(
            f"encoder {quote(encoder)}: expected {', '.join(RANKERS)}, a model folder, or a hub id like 'org/name'"
        )
    rules, target = parse_protocol(protocol), Path(out)
    if not target.name.endswith(SUFFIXES):
        raise RunError(f"{out}: expected a name ending in {' or '.join(SUFFIXES)}")
    if target.exists() and Path(data).exists() and target.samefile(data):
        raise RunError(f"{out}: exists already and is also the input; choose another file with --out")
    with contextlib.suppress(OSError):
        temporary_name(target).unlink(missing_ok=True)  # left by a killed call
    rows, queries = read_queries(data)
    texts = truncated = 0
    if encoder in RANKERS:
        count = Count(len(queries), unit="profiles")
        with show_progress(f"ranking by {encoder}", count, enabled=progress) as display:
            orders = RANKERS[encoder](display.each(queries))
    else:
        from prb_jax.models.readouts.text_encoder import (
            load_text_encoder,  # rankers without a model start no JAX
        )

        ranking = rank_by_similarity(queries, load_text_encoder(encoder, **options), progress=progress)
        orders, texts, truncated = ranking.orders, ranking.texts, ranking.truncated
    # record only the name of a folder: its location is irrelevant
    ordered_by = Path(encoder).resolve().name if is_path and encoder not in RANKERS else encoder
    lines = []
    for row, query, order in zip(rows, queries, orders, strict=True):
        record = dict(row.value)
        if query.posts:
            ranked = [query.posts[position] for position in order]
            if rules is TextProtocol.PAPER:
                ranked = [{**best, "id": post.get("id")} for post, best in zip(query.posts, ranked)]
            record |= {"profile": ranked, "profile_order": ordered_by}
        lines.append(json.dumps(record, default=str) + "\n")
    content = "".join(lines).encode()  # equal contents are equal bytes, gzipped or not
    write_once({target: gzip.compress(content, mtime=0) if target.name.endswith(".gz") else content})
    profiles = sum(bool(query.posts) for query in queries)
    return Ranked(target, len(rows), profiles, texts=texts, truncated=truncated)


def read_queries(data: str | Path) -> tuple[list[Row], list[Query]]:
    """Return the records of a file, or of any other source of ``read_comparisons``, and the query of each.

    Raises:
      DataError: a record has the wrong format, or there are no records.
    """
    rows = source_rows(data)
    questions = [Comparison.from_row(row.value, where=row.where).question for row in rows]
    return rows, [Query(row.where, q, row.value.get("profile") or ()) for row, q in zip(rows, questions)]
