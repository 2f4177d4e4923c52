"""`prb bench rank`: how fast an encoder ranks profiles, beside the usual way of one question at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.checkpoints.locate import locate
from prb_jax.errors import DataError
from prb_jax.readouts.text_encoder import TextEncoder, load_text_encoder
from prb_jax.reports.style import ResultsTable
from prb_jax.retrieval.rank_profiles import read_queries
from prb_jax.retrieval.rankers import Query, SimilarityRanking, rank_by_similarity

AGAINST_USERS = 2
"""Users that the usual way ranks a round, where it is not said."""


@dataclass(frozen=True, kw_only=True)
class RankingResult:
    """Ranking in one dtype. Rates are medians over rounds; ``speedup`` is the median of ratios.

    Attributes:
      dtype: of our side; the usual way is computed in float32.
      users, posts: that our side ranks a round, each user by one question.
      texts: distinct ones among these questions and posts, which is what our side embeds.
      users_per_second, posts_per_second: ranked; a post counts each time that it is in a profile.
      tokens_per_second: real tokens of the distinct texts.
      padding_waste: share of the computed tokens that is padding.
      compiles, compile_seconds: programs, and the time of the first pass beyond that of another; with a warm
        compilation cache that is the time to load them.
      against_users, against_posts: that the usual way ranked, over all rounds.
      against_posts_per_second, speedup: the usual way, and how many times faster our side ranks a post.
      against_padding_waste: its padding.
      equal_orders: users of ``against_users`` whose posts are in the same order both ways.
      largest_swap: how much better a post is, by the scores of the usual way, than one that our side puts
        before it: at most; 0 where all orders are equal.
    """

    dtype: str
    users: int
    posts: int
    texts: int
    users_per_second: float
    posts_per_second: float
    tokens_per_second: float
    padding_waste: float
    compiles: int
    compile_seconds: float
    against_users: int | None = None
    against_posts: int | None = None
    against_posts_per_second: float | None = None
    speedup: float | None = None
    against_padding_waste: float | None = None
    equal_orders: int | None = None
    largest_swap: float | None = None


def bench_ranking(
    model: str | Path,
    *,
    data: str | Path,
    users: int | None,
    rounds: int,
    against: str | None,
    against_users: int | None,
    mesh: str | None,
    dtype: str | None,
) -> RankingResult:
    """Times rankings of ours and, where asked for, of transformers, in turn.

    Args:
      model: folder or hub id of an encoder.
      data: a source of ``read_comparisons``. Each user with a profile is one query: the first record; records
        without a ``user_id`` count as users of their own.
      users: the first of them, for our side; all if None.
      rounds: timed passes of each side, after one that is not.
      against: "transformers" or None.
      against_users: that the usual way ranks a round, others in the next one; its rate of posts is carried over.
      mesh, dtype: for :func:`prb_jax.readouts.text_encoder.load_text_encoder`.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: no user has a profile, or fewer than are asked for.
      RunError: torch is not installed.
    """
    queries = _first_of_each_user(data, users)
    if against_users is not None and against_users > len(queries):
        raise DataError(f"against_users {against_users}: more than the {len(queries)} users that are ranked")
    folder = locate(model)
    encoder = load_text_encoder(model, mesh=mesh, dtype=dtype)
    rival = None
    if against:
        from prb_jax.bench.rivals.transformers_ranking import TransformersRanker

        rival = TransformersRanker(folder.path, pooling=encoder.pooling, max_length=encoder.max_length)
        rival.run(queries[:1])
    first_seconds, ranking = _timed(queries, encoder)
    compiles = cast(Any, encoder.embed_fn)._cache_size()
    step = min(against_users or AGAINST_USERS, len(queries))
    passes, theirs, picked = list[float](), [], list[int]()
    for number in range(rounds):
        passes.append(_timed(queries, encoder)[0])
        if rival:
            places = [(number * step + k) % len(queries) for k in range(step)]
            picked += places
            theirs.append(rival.run([queries[place] for place in places]))
    posts = sum(len(query.posts) for query in queries)
    seconds = statistics.median(passes)
    result: dict[str, Any] = {
        "dtype": encoder.dtype,
        "users": len(queries),
        "posts": posts,
        "texts": ranking.texts,
        "users_per_second": len(queries) / seconds,
        "posts_per_second": posts / seconds,
        "tokens_per_second": ranking.tokens / seconds,
        "padding_waste": 1 - ranking.tokens / ranking.padded_tokens,
        "compiles": compiles,
        "compile_seconds": max(0.0, first_seconds - seconds),
    }
    if theirs:
        rates = [each.posts / each.seconds for each in theirs]
        orders = [order for each in theirs for order in each.orders]
        scores = [found for each in theirs for found in each.scores]
        # A user may have had a turn in several rounds, where everything is as before.
        by_user = dict(zip(picked, zip(orders, scores, strict=True), strict=True))
        ours = ranking.orders
        result |= {
            "against_users": len(by_user),
            "against_posts": sum(len(order) for order, _ in by_user.values()),
            "against_posts_per_second": statistics.median(rates),
            "speedup": statistics.median(
                posts / each / rate for each, rate in zip(passes, rates, strict=True)
            ),
            "against_padding_waste": 1
            - sum(each.tokens for each in theirs) / sum(each.padded_tokens for each in theirs),
            "equal_orders": sum(order == ours[place] for place, (order, _) in by_user.items()),
            "largest_swap": max(largest_swap(ours[place], found) for place, (_, found) in by_user.items()),
        }
    return RankingResult(**result)


def largest_swap(order: Sequence[int], scores: np.ndarray) -> float:
    """How much higher a score is than one that stands before it in this order, at most; 0 where none is.

    Args:
      order: positions of ``scores``, at least one.
      scores: float [posts].
    """
    ordered = scores[list(order)]
    return float((ordered - np.minimum.accumulate(ordered)).max())


def table(results: Sequence[RankingResult]) -> ResultsTable:
    """Return all results, a column each."""
    columns: list[tuple[str, Callable[[RankingResult], str]]] = [
        ("dtype", lambda r: r.dtype),
        ("users", lambda r: str(r.users)),
        ("posts", lambda r: f"{r.posts:,}"),
        ("distinct texts", lambda r: f"{r.texts:,}"),
        ("users/s", lambda r: f"{r.users_per_second:.3f}"),
        ("posts/s", lambda r: f"{r.posts_per_second:.1f}"),
        ("tokens/s", lambda r: f"{r.tokens_per_second:,.0f}"),
        ("padding", lambda r: f"{r.padding_waste:.0%}"),
        ("compiles", lambda r: str(r.compiles)),
        ("compile s", lambda r: f"{r.compile_seconds:.1f}"),
    ]
    if any(each.speedup is not None for each in results):
        columns += [
            ("transformers posts/s", lambda r: f"{r.against_posts_per_second:.1f}"),
            ("its padding", lambda r: f"{r.against_padding_waste:.0%}"),
            ("speed-up", lambda r: f"{r.speedup:.2f}x"),
            ("equal orders", lambda r: f"{r.equal_orders} of {r.against_users}"),
            ("largest swap", lambda r: f"{r.largest_swap:.1e}"),
        ]
    return ResultsTable("ranking", [(name, [cell(each) for each in results]) for name, cell in columns])


def _first_of_each_user(data: str | Path, users: int | None) -> list[Query]:
    rows, queries = read_queries(data)
    found: dict[Any, Query] = {}
    for number, (row, query) in enumerate(zip(rows, queries, strict=True)):
        if query.posts:
            user = row.value.get("user_id")
            # A name is a text, a place a number: they never meet.
            found.setdefault(number if user is None else user, query)
    if not found:
        raise DataError(f"{data}: no comparison has a profile to rank")
    if users is not None and users > len(found):
        raise DataError(f"{data}: {len(found)} users have a profile, and {users} are asked for")
    return list(found.values())[:users]


def _timed(queries: Sequence[Query], encoder: TextEncoder) -> tuple[float, SimilarityRanking]:
    start = time.perf_counter()
    ranking = rank_by_similarity(queries, encoder)
    return time.perf_counter() - start, ranking
