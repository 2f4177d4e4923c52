"""Users of comparisons that name none: those whose profiles share a post are one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from prb_jax.metrics.clusters import Components
from prb_jax.records.comparison import Comparison, Post


def derived_users(comparisons: Sequence[Comparison]) -> tuple[str | None, ...]:
    """Return a name for each connected component of shared posts; None where there is no profile."""
    profiles = {comparison.profile for comparison in comparisons if comparison.profile}
    texts: dict[str, set[str]] = {}
    for post in (post for profile in profiles for post in profile):
        texts.setdefault(post.id, set()).add(post.text)

    def key(post: Post) -> Hashable:
        # an id that stands for several texts, as a number within each profile does, says nothing by itself
        return post.id if post.id and len(texts[post.id]) == 1 else (post.id, post.text)

    people = Components()
    for profile in profiles:
        for post in profile:
            people.join(key(post), key(profile[0]))
    names: dict[Hashable, str] = {}

    def name(profile: tuple[Post, ...]) -> str:
        return names.setdefault(people.root(key(profile[0])), f"derived-{len(names) + 1}")

    return tuple(name(comparison.profile) if comparison.profile else None for comparison in comparisons)
