"""What belongs together: connected components of things that are joined two at a time."""

from __future__ import annotations

from collections.abc import Hashable


class Components:
    """Disjoint sets of nodes, each known by its root; a node that was never named is a set of its own."""

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
