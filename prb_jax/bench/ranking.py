"""`prb bench rank`: how fast an encoder ranks profiles, beside the usual way of one question at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.bench.table import shown
from prb_jax.checkpoints.locate import locate
from prb_jax.errors import DataError
from prb_jax.readouts.text_encoder import TextEncoder, load_text_encoder
from prb_jax.retrieval.rank_profiles import read_queries
from prb_jax.retrieval.rankers import Query, SimilarityRanking, rank_by_similarity

AGAINST_USERS = 2
"""Users that the usual way ranks a round, where it is not said."""


@dataclass(frozen=True, kw_only=True)
class RankingResult:
    """Ranking in one dtype. Rates are medians over rounds; ``speedup`` is the median of ratios."""

    dtype: str = field(metadata=shown("dtype", meaning="of our side; the usual way is computed in float32"))
    users: int = field(metadata=shown("users", meaning="ranked a round, each by one question"))
    posts: int = field(metadata=shown("posts", "{v:,}", "each time that it is in a profile"))
    texts: int = field(metadata=shown("distinct texts", "{v:,}", "questions and posts, embedded by our side"))
    users_per_second: float = field(metadata=shown("users/s", "{v:.3f}"))
    posts_per_second: float = field(metadata=shown("posts/s", "{v:.1f}"))
    tokens_per_second: float = field(
        metadata=shown("tokens/s", "{v:,.0f}", "real tokens of the distinct texts")
    )
    padding_waste: float = field(metadata=shown("padding", "{v:.0%}", "of the computed tokens"))
    compiles: int = field(metadata=shown("compiles", meaning="programs"))
    compile_seconds: float = field(metadata=shown("compile s", "{v:.1f}", "of the first pass beyond another"))
    against_users: int | None = None
    against_posts: int | None = None
    against_posts_per_second: float | None = field(
        default=None, metadata=shown("transformers posts/s", "{v:.1f}")
    )
    speedup: float | None = field(default=None, metadata=shown("speed-up", "{v:.2f}x", "for a post"))
    against_padding_waste: float | None = field(default=None, metadata=shown("its padding", "{v:.0%}"))
    equal_orders: int | None = field(
        default=None, metadata=shown("equal orders", "{v} of {r.against_users}", "users ranked both ways")
    )
    largest_swap: float | None = field(
        default=None,
        metadata=shown(
            "largest swap",
            "{v:.1e}",
            "how much better a post is, by the scores of the usual way, than one that our side puts before it",
        ),
    )


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

    The arguments are the options of `prb bench rank`, whose help explains them.

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
        rates = [timed.posts / timed.seconds for timed in theirs]
        orders = [order for timed in theirs for order in timed.orders]
        scores = [found for timed in theirs for found in timed.scores]
        # A user may have had a turn in several rounds, where everything is as before.
        by_user = dict(zip(picked, zip(orders, scores, strict=True), strict=True))
        ours = ranking.orders
        result |= {
            "against_users": len(by_user),
            "against_posts": sum(len(order) for order, _ in by_user.values()),
            "against_posts_per_second": statistics.median(rates),
            "speedup": statistics.median(
                posts / seconds_of_pass / rate for seconds_of_pass, rate in zip(passes, rates, strict=True)
            ),
            "against_padding_waste": 1
            - sum(timed.tokens for timed in theirs) / sum(timed.padded_tokens for timed in theirs),
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
