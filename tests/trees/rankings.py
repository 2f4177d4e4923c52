"""Rankings of one question's responses by several people, turned into pairs: each response is in many comparisons."""

from __future__ import annotations

import itertools

import numpy as np

from prb_jax.trees.tree import Tree, build_tree

PROFILES = (0, 20, 60)
"""Tokens of what is shown of each person."""

STATEMENTS = 5


def pairs_of_rankings() -> tuple[list[Tree], int]:
    """Return ten pairs of each person, in no order, and the tokens of their distinct conversations.

    Of some pairs the two responses begin alike, so that they are divided behind that beginning.
    """
    rng = np.random.default_rng(0)
    question = rng.integers(10, 60, 12)
    statements = [
        np.concatenate([[60] * (k % 3), [k + 1], rng.integers(10, 60, 3 + 5 * k)]) for k in range(STATEMENTS)
    ]
    trees, tokens = [], 0
    for size in PROFILES:
        prompt = np.concatenate([np.arange(size) % 40 + 10, [size + 1], question])
        trees += [
            build_tree([np.concatenate([prompt, statement]) for statement in pair])
            for pair in itertools.combinations(statements, 2)
        ]
        tokens += len(prompt) + sum(map(len, statements))
    return [trees[index] for index in rng.permutation(len(trees))], tokens
