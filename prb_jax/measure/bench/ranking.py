"""`prb bench rank`: how fast an encoder ranks profiles, compared with transformers, one question at a time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.errors import DataError
from prb_jax.measure.bench.figures import Figures, median_ratio, timed
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.models.checkpoints.locate import locate
from prb_jax.models.readouts.text_encoder import load_text_encoder
from prb_jax.study.retrieval.rank_profiles import Query, rank_by_similarity, read_queries

AGAINST_USERS = 2  # default number of users that transformers ranks per round


def bench_ranking(options: BenchOptions) -> Figures:
    """Time rankings of ours and, on request, of transformers, alternating.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: no user has a profile, or fewer users than requested have one.
      RunError: torch is not installed.
    """
    queries = _first_of_each_user(options.data, options.users)
    users, asked = len(queries), options.against_users
    if asked is not None and asked > users:
        raise DataError(f"against_users {asked}: expected at most {users}, the users that are ranked")
    folder = locate(options.model)
    encoder = load_text_encoder(options.model, mesh=options.mesh, dtype=options.dtype)
    rival = None
    if options.against:
        from prb_jax.measure.bench.rivals.transformers import TransformersRanker

        rival = TransformersRanker(folder.path, pooling=encoder.pooling, max_length=encoder.max_length)
        rival.run(queries[:1])
    first, ranking = timed(lambda: rank_by_similarity(queries, encoder))
    compiles = cast(Any, encoder.embed_fn)._cache_size()
    step, passes, theirs = min(asked or AGAINST_USERS, users), list[float](), []
    picked = [[(number * step + k) % users for k in range(step)] for number in range(options.rounds)]
    for places in picked:
        passes.append(timed(lambda: rank_by_similarity(queries, encoder))[0])
        if rival:
            theirs.append(rival.run([queries[place] for place in places]))
    posts, seconds = sum(len(query.posts) for query in queries), statistics.median(passes)
    ranked, their_posts, rate, speed, padding, equal, swap = (None,) * 7
    if theirs:
        rates = [run.posts / run.seconds for run in theirs]
        rate = statistics.median(rates)
        speed = median_ratio([posts / seconds_of_pass for seconds_of_pass in passes], rates)
        # A user may be ranked in several rounds, always with the same result.
        by_user = {
            place: pair
            for places, run in zip(picked, theirs, strict=True)
            for place, pair in zip(places, zip(run.orders, run.scores, strict=True), strict=True)
        }
        ours, ranked = ranking.orders, len(by_user)
        their_posts = sum(len(order) for order, _ in by_user.values())
        padding = 1 - sum(run.tokens for run in theirs) / sum(run.padded_tokens for run in theirs)
        equal = sum(order == ours[place] for place, (order, _) in by_user.items())
        swap = max(largest_swap(ours[place], scores) for place, (_, scores) in by_user.items())
    figures = Figures()
    add = figures.add
    add("dtype", encoder.dtype, "dtype")  # of our side; transformers computes in float32
    add("users", users, "users")
    add("posts", posts, "posts", "{:,}")  # counted in every profile that contains it
    add("texts", ranking.texts, "distinct texts", "{:,}")
    add("users_per_second", users / seconds, "users/s", "{:.3f}")
    add("posts_per_second", posts / seconds, "posts/s", "{:.1f}")
    add("tokens_per_second", ranking.tokens / seconds, "tokens/s", "{:,.0f}")  # of the distinct texts
    add("padding_waste", 1 - ranking.tokens / ranking.padded_tokens, "padding", "{:.0%}")
    add("compiles", compiles, "compiles")
    add("compile_seconds", max(0.0, first - seconds), "compile s", "{:.1f}")
    add("against_users", ranked)
    add("against_posts", their_posts)
    add("against_posts_per_second", rate, "transformers posts/s", "{:.1f}")
    add("speedup", speed, "speed-up", "{:.2f}x")
    add("against_padding_waste", padding, "its padding", "{:.0%}")
    add("equal_orders", equal, "equal orders", f"{{}} of {ranked}")
    add("largest_swap", swap, "largest swap", "{:.1e}")
    return figures


def largest_swap(order: Sequence[int], scores: np.ndarray) -> float:
    """Return the largest excess of a score over an earlier one in this order; 0 if the order is correct.

    Args:
      order: Positions of ``scores``, at least one.
      scores: Scores, float [posts].
    """
    ordered = scores[list(order)]
    return float((ordered - np.minimum.accumulate(ordered)).max())


def _first_of_each_user(data: str | Path, users: int | None) -> list[Query]:
    rows, queries = read_queries(data)
    by_user: dict[Any, Query] = {}
    for number, (row, query) in enumerate(zip(rows, queries, strict=True)):
        if query.posts:
            user = row.value.get("user_id")
            # Names are texts, places numbers: they never collide.
            by_user.setdefault(number if user is None else user, query)
    if not by_user:
        raise DataError(f"{data}: no comparison has a profile to rank")
    if users is not None and users > len(by_user):
        raise DataError(f"{data}: {len(by_user)} users have a profile, expected {users} or more")
    return list(by_user.values())[:users]
