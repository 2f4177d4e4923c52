"""Divides the trees that wait among the batches that a machine computes at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from prb_jax.trees.tree import Tree, common_run

SLACK = 1.25
"""A batch may be so many times as large as its share: smaller differences are not worth a rest."""


def take_share(
    members: Sequence[int],
    tree_of: Callable[[int], Tree],
    *,
    share: float,
    kept: Callable[[Tree], int],
    first: Collection[int] = (),
) -> list[int]:
    """Return the members of a batch that make up its share of all work, or all of them if the rest is small.

    Otherwise one batch would take every waiting request, the next one only the requests that came meanwhile, and small
    batches cost more for each token. Trees that share most of their tokens stay together.

    Args:
      members: Members of the batch, in the order of their prefixes.
      tree_of: Returns the tree of a member.
      share: Tokens of the share.
      kept: Returns the number of cached tokens of a tree.
      first: Members that must not wait.
    """
    groups: list[list[int]] = []
    costs: list[int] = []
    for before, member in itertools.pairwise([None, *members]):
        assert member is not None
        tree = tree_of(member)
        run = 0 if before is None else common_run([tree_of(before).sequence(0), tree.sequence(0)])
        if not groups or 2 * run < tree.tokens:
            groups.append([])
            costs.append(0)
        groups[-1].append(member)
        costs[-1] += tree.tokens - max(run, kept(tree))
    if sum(costs) <= SLACK * share:
        return list(members)
    needed = set(first)
    order = sorted(range(len(groups)), key=lambda at: (not needed.intersection(groups[at]), min(groups[at])))
    taken, size = list[int](), 0
    for at in order:
        if size >= share and not needed.intersection(groups[at]):
            continue
        taken += groups[at]
        size += costs[at]
    return taken
