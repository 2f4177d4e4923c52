"""PrefEval (arXiv 2502.09597), classification task: the one of four options that fits a stated preference.

The wording often reveals the right option: compare with a run with ``--profile-posts 0`` to see how much of a score is
personalisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import margin
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks.benchmark import Benchmark, BenchmarkScore, Place, mean

TOPICS: Final = (
    "education_learning_styles",
    "education_resources",
    "entertain_games",
    "entertain_music_book",
    "entertain_shows",
    "entertain_sports",
    "lifestyle_beauty",
    "lifestyle_dietary",
    "lifestyle_fit",
    "lifestyle_health",
    "pet_ownership",
    "professional_work_location_style",
    "shop_fashion",
    "shop_home",
    "shop_motors",
    "shop_technology",
    "travel_activities",
    "travel_hotel",
    "travel_restaurant",
    "travel_transportation",
)
"""Names of the published files; a copy of one of them, which lies beside them, is not read."""


def record(row: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """All options in one comparison, the fitting one first; the preference is the user's profile."""
    if "classification_task_options" not in row:
        return {**row, "subset": row.get("subset") or row.get("category")}
    options = fields.sequence(row["classification_task_options"], place.where, "classification_task_options")
    topic = row.get("topic") or PurePosixPath(place.path).stem
    user = f"{topic}-{place.number - 1}"
    preference = fields.text(row.get("preference"), place.where, "preference")
    return {
        "id": user,
        "user_id": user,
        "question": row.get("question"),
        "responses": list(options),
        "labels": [1.0] + [0.0] * (len(options) - 1),
        "subset": topic,
        "profile": [{"id": "preference", "category": "stated preference", "text": preference}],
        "narrative": preference,
    }


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Return the share of users with a fitting option that scores strictly above all others.

    Options can be in one row, or in one pair per wrong option; rows are combined by user.
    """
    users: dict[str, list[ScoredRow]] = {}
    for row in rows:
        if row.user_id is None:
            raise DataError(f"row {quote(row.id)}: no user, which this benchmark's rule needs")
        users.setdefault(row.user_id, []).append(row)
    right = {
        user: all(margin(row.scores, row.labels, id=row.id) > 0 for row in members)
        for user, members in users.items()
    }
    topics: dict[str, list[bool]] = {}
    for user, members in users.items():
        if members[0].subset is not None:
            topics.setdefault(members[0].subset, []).append(right[user])
    return BenchmarkScore(
        score=mean(right.values()),
        figures={
            "comparisons won": mean(margin(row.scores, row.labels, id=row.id) > 0 for row in rows),
            **{topic: mean(topics[topic]) for topic in sorted(topics)},
        },
        details={"users": len(users), "comparisons": len(rows)},
    )


BENCHMARK = Benchmark(
    name="prefeval",
    rule="users whose fitting option scores strictly above all others / users",
    score=score,
    files="*.json",
    topics=TOPICS,
    home="the folder benchmark_dataset/mcq_options of github.com/amazon-science/PrefEval",
    record=record,
)
