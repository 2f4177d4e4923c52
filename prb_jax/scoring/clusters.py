"""Which comparisons depend on each other: those of one user, and those in which the same responses are judged."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from hashlib import sha256

from prb_jax.data.comparison import Comparison, Post
from prb_jax.metrics.clusters import Clusters, crossed_keys, shared_rows
from prb_jax.metrics.components import Components
from prb_jax.scoring.comparison_table import ComparisonTable
from prb_jax.sources.large import LargeComparisons

_LEAST_SHARED = 0.01
"""Share of the comparisons with a response that another user judges too, from which the data are crossed."""


def clusters_of(comparisons: Sequence[Comparison], table: ComparisonTable | None = None) -> Clusters:
    """Return the clusters of comparisons, in their order.

    Args:
      comparisons: of a run. Those that are read by windows, because they are large, are clustered by their users alone.
      table: of the comparisons, needed for those that are read by windows.

    Where no comparison has a user, comparisons whose profiles share a post belong to one user. The data are crossed
    where one in a hundred comparisons has a response, to the same prompt, that another user judges too.
    """
    if table is not None and isinstance(comparisons, LargeComparisons):
        return Clusters(tuple(table.user(index) for index in range(len(table))))
    users = tuple(comparison.user_id for comparison in comparisons)
    derived = False
    if not any(user is not None for user in users) and any(c.profile for c in comparisons):
        users, derived = derived_users(comparisons), True
    sets = [_response_keys(comparison) for comparison in comparisons]
    if shared_rows(users, sets) < max(1, _LEAST_SHARED * len(comparisons)):
        return Clusters(users, None, derived)
    return Clusters(users, crossed_keys(sets), derived)


def _response_keys(comparison: Comparison) -> list[str]:
    prompt = sha256(repr([(m.role, m.content) for m in comparison.prompt]).encode()).digest()
    return [sha256(prompt + text.encode()).hexdigest()[:16] for text in comparison.responses]


def derived_users(comparisons: Sequence[Comparison]) -> tuple[str | None, ...]:
    """Return a name for each connected component of shared posts; None where there is no profile."""
    texts: dict[str, set[str]] = {}
    for post in _posts(comparisons):
        texts.setdefault(post.id, set()).add(post.text)

    def key(post: Post) -> Hashable:
        # an id that stands for several texts, as a number within each profile does, says nothing by itself
        return post.id if post.id and len(texts[post.id]) == 1 else (post.id, post.text)

    people = Components()
    for profile in {comparison.profile for comparison in comparisons}:
        for post in profile[1:]:
            people.join(key(post), key(profile[0]))
    names: dict[Hashable, str] = {}
    users: list[str | None] = []
    for comparison in comparisons:
        if not comparison.profile:
            users.append(None)
            continue
        root = people.root(key(comparison.profile[0]))
        users.append(names.setdefault(root, f"derived-{len(names) + 1}"))
    return tuple(users)


def _posts(comparisons: Sequence[Comparison]) -> Iterable[Post]:
    seen: set[int] = set()
    for comparison in comparisons:
        if id(comparison.profile) not in seen:
            seen.add(id(comparison.profile))
            yield from comparison.profile
