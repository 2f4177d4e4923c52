"""The statistical clusters of comparisons, and derived users.

Comparisons depend on each other if they share a user or judge the same responses. Comparisons without a user are one
user's if their profiles share a post.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

from prb_jax.metrics.clusters import Clusters, Components, crossed_keys, shared_rows
from prb_jax.records.comparison import Comparison, Post
from prb_jax.records.items import Items
from prb_jax.scoring.inputs import ComparisonTable
from prb_jax.scoring.large_table import LargeTable


def derived_users(comparisons: Sequence[Comparison]) -> tuple[str | None, ...]:
    """Return the user of each comparison: a connected component of shared posts; None for one without a profile."""
    profiles = {comparison.profile for comparison in comparisons if comparison.profile}
    texts: dict[str, set[str]] = {}
    for post in (post for profile in profiles for post in profile):
        texts.setdefault(post.id, set()).add(post.text)

    def key(post: Post) -> Hashable:
        # an id with several texts, e.g. a number within each profile, does not identify a post
        return post.id if post.id and len(texts[post.id]) == 1 else (post.id, post.text)

    people = Components()
    for profile in profiles:
        for post in profile:
            people.join(key(post), key(profile[0]))
    names: dict[Hashable, str] = {}

    def name(profile: tuple[Post, ...]) -> str:
        return names.setdefault(people.root(key(profile[0])), f"derived-{len(names) + 1}")

    return tuple(name(comparison.profile) if comparison.profile else None for comparison in comparisons)


_LEAST_SHARED = 0.01
"""Least share of comparisons with a response that another user judges too, for the data to count as crossed."""


def clusters_of(comparisons: Sequence[Comparison]) -> Clusters:
    """Return the clusters of comparisons, in their order.

    If no comparison has a user, comparisons with a common post in their profiles belong to one user. The data are
    crossed if at least 1 % of the comparisons share a response, to the same prompt, with another user.
    """
    users = tuple(comparison.user_id for comparison in comparisons)
    derived = all(user is None for user in users) and any(c.profile for c in comparisons)
    if derived:
        users = derived_users(comparisons)
    sets = [_response_keys(comparison) for comparison in comparisons]
    if shared_rows(users, sets) < max(1, _LEAST_SHARED * len(comparisons)):
        return Clusters(users, None, derived)
    return Clusters(users, crossed_keys(sets), derived)


def _response_keys(comparison: Comparison) -> list[str]:
    turns = [(m.role, m.content) for m in comparison.prompt]
    prompt = hashlib.sha256(f"{turns!r}{comparison.context}".encode()).digest()
    return [hashlib.sha256(prompt + text.encode()).hexdigest()[:16] for text in comparison.responses]


def clusters_of_table(table: ComparisonTable, comparisons: Items[Comparison]) -> Clusters:
    """Return the clusters of a run's comparisons; data larger than memory are clustered only by user."""
    if comparisons.in_memory:
        return clusters_of(comparisons)
    assert isinstance(table, LargeTable)
    return Clusters(tuple(table.users[index] for index in range(len(table))))
