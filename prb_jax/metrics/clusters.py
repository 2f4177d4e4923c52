"""What belongs together: rows of one user, rows in which the same responses are judged, and whatever is joined."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from prb_jax.errors import short_repr

OVER_USERS: Final = "users"
OVER_DERIVED_USERS: Final = "users derived from shared profile posts"
OVER_COMPARISONS: Final = "comparisons"


@dataclass(frozen=True)
class Clusters:
    """For n rows, in their order, what makes them depend on each other.

    Attributes:
      users: [n] the user of each row; None for a row that is a cluster of its own.
      responses: [n] keys of the responses that are judged in each row, where several users judge the same ones
        (crossed data): one key for the whole set of responses, or two for a pair whose responses also occur
        in other pairs. None where the data are not crossed.
      derived: whether the users were derived from shared posts, because the data name none.
    """

    users: tuple[str | None, ...]
    responses: tuple[tuple[str, ...], ...] | None = None
    derived: bool = False

    __repr__ = short_repr

    @property
    def over(self) -> str:
        """What an interval is taken over: "users", "users derived from ...", or "comparisons"."""
        if all(user is None for user in self.users):
            return OVER_COMPARISONS
        return OVER_DERIVED_USERS if self.derived else OVER_USERS

    def take(self, index: Sequence[int]) -> Clusters:
        """Return the clusters of some of the rows; crossed only if these rows are."""
        users = tuple(self.users[i] for i in index)
        responses = None if self.responses is None else tuple(self.responses[i] for i in index)
        if responses is not None and not shared_rows(users, responses):
            responses = None
        return Clusters(users, responses, self.derived)


def shared_rows(users: Sequence[str | None], responses: Sequence[Sequence[str]]) -> int:
    """Return how many rows have a response that another user judges too.

    Args:
      users: [n] of the rows.
      responses: [n] keys of the responses of each row.
    """
    first: dict[str, str | None] = {}
    shared: set[str] = set()
    for user, keys in zip(users, responses, strict=True):
        if user is not None:
            shared.update(key for key in keys if first.setdefault(key, user) != user)
    return sum(
        user is not None and any(key in shared for key in keys)
        for user, keys in zip(users, responses, strict=True)
    )


def crossed_keys(sets: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the keys by which rows are clustered, from the keys of all responses of each row.

    A response that always occurs in the same set needs no key beside that of its set. The two responses of
    a pair keep a key each where one of them also occurs in another pair.
    """
    whole = [tuple(sorted(keys)) for keys in sets]
    of_response: dict[str, set[tuple[str, ...]]] = {}
    for keys in whole:
        for key in keys:
            of_response.setdefault(key, set()).add(keys)
    mixed = any(len(found) > 1 for found in of_response.values())
    if mixed and all(len(keys) == 2 for keys in whole):
        return tuple(whole)
    return tuple(("\n".join(keys),) for keys in whole)


class Components:
    """Connected components: disjoint sets of nodes, each known by its root; a node that was never named is alone."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def root(self, node: Hashable) -> Hashable:
        """Return the node that stands for all nodes that are joined with this one by now."""
        parent = self._parent
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]  # halve the path
            node = parent[node]
        return node

    def join(self, node: Hashable, other: Hashable) -> None:
        """Put two nodes, and what belongs to each, together; the root is that of the other."""
        self._parent[self.root(node)] = self.root(other)
