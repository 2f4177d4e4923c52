"""Derive users for comparisons without one: comparisons with a common post in their profiles are one user."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from prb_jax.metrics.clusters import Components
from prb_jax.records.comparison import Comparison, Post


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
