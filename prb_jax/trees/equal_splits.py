"""Divide comparisons with a common conversation at the same place, so a stream computes the conversation once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from prb_jax.trees.packing import LEAST_SHARED
from prb_jax.trees.tree import Tree


def with_equal_splits(trees: Sequence[Tree]) -> list[Tree]:
    """Return the trees with the same split into prefix and responses for trees with a common conversation.

    A stream then computes the common conversation once. Prefixes become shorter by at most :data:`LEAST_SHARED` tokens,
    which the responses of their tree no longer share.
    """
    group = list(range(len(trees)))  # group of each tree
    members = {index: [index] for index in group}
    shortest, longest = ([len(tree.prefix) for tree in trees] for _ in range(2))
    first: dict[bytes, int] = {}
    for index, tree in enumerate(trees):
        begun = blake2b(tree.prefix.tobytes(), digest_size=16)
        for response in tree.responses:
            whole = begun.copy()
            whole.update(response.tobytes())
            one, other = group[first.setdefault(whole.digest(), index)], group[index]
            low, high = min(shortest[one], shortest[other]), max(longest[one], longest[other])
            if one != other and high - low <= LEAST_SHARED:
                one, other = sorted((one, other), key=lambda number: -len(members[number]))
                members[one] += (moved := members.pop(other))
                shortest[one], longest[one] = low, high
                for member in moved:
                    group[member] = one
    return [divided_at(tree, shortest[group[index]]) for index, tree in enumerate(trees)]


def divided_at(tree: Tree, length: int) -> Tree:
    """Return the tree with its prefix cut to `length` tokens; the rest moves to the responses."""
    moved = tree.prefix[length:]
    if not len(moved):
        return tree
    return replace(
        tree,
        prefix=tree.prefix[:length],
        responses=tuple(np.concatenate([moved, response]) for response in tree.responses),
        read=tuple(read + len(moved) for read in tree.read),
    )
