"""People with planted tastes, and a source of features that knows the plan: no model is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import prb_jax as prb
from prb_jax.personal.embedder import Advance, Embedded

WIDTH = 6
QUICK = ("pooled.l2=0.001", "offset.l2=0.001", "offset.spread=3")
"""Settings with which the methods of every study have nothing to choose."""


class PlantedFeatures:
    """A response "r12" has the twelfth row of a table; a post has the row of the number in it."""

    name = "planted"
    width = WIDTH
    gives_rewards = False

    def __init__(self, rows: int = 200, seed: int = 0) -> None:
        self.table = np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)

    def identity(self) -> dict[str, Any]:
        return {"planted": len(self.table)}

    def answers(self, comparisons: Sequence[prb.Comparison], *, advance: Advance) -> Embedded:
        return self.posts([comparison.responses[0] for comparison in comparisons], advance=advance)

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        advance(len(texts), len(texts))
        return Embedded(self.rows(texts), truncated=0)

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        """The features of texts, float32 [n, WIDTH]."""
        return self.table[[int(text.split()[0][1:]) for text in texts]]


class PlantedRewards(PlantedFeatures):
    """The same with rewards: without a profile those of a linear head, with one 1 for what this person chose.

    Args:
      chosen: of each person, known by the post, the responses that were chosen.
    """

    gives_rewards = True

    def __init__(self, chosen: set[tuple[str, str]]) -> None:
        super().__init__()
        self.chosen = chosen

    def answers(self, comparisons: Sequence[prb.Comparison], *, advance: Advance) -> Embedded:
        features = super().answers(comparisons, advance=advance).features
        return Embedded(features, 0, features @ np.arange(1, WIDTH + 1, dtype=np.float32))

    def shown(
        self, comparisons: Sequence[prb.Comparison], *, profile_posts: int, advance: Advance
    ) -> tuple[np.ndarray, int]:
        known = [(one.profile[0].text, one.responses[0]) in self.chosen for one in comparisons]
        return np.array(known, np.float32), 0


def planted_people(
    features: PlantedFeatures,
    *,
    users: int = 40,
    each: int = 12,
    own: float = 3.0,
    told: float = 0.0,
    noise: float = 0.0,
    seed: int = 1,
) -> list[prb.Comparison]:
    """Choices of people whose taste is a common direction, one that their post tells (its last two features, as the
    tastes for the first two) and an own one; Bradley-Terry with a noise of 1."""
    rng = np.random.default_rng(seed)
    common, comparisons = rng.standard_normal(WIDTH), []
    for user in range(users):
        post = user % len(features.table)
        taste = common + own * rng.standard_normal(WIDTH)
        taste[:2] += told * features.table[post, -2:]
        for number in range(each):
            one, other = (int(row) for row in rng.choice(len(features.table), 2, replace=False))
            by_chance = noise * rng.logistic() if noise else 0.0
            if features.table[one] @ taste + by_chance < features.table[other] @ taste:
                one, other = other, one
            profile = [{"id": "p", "text": f"r{post} of mine"}]
            names, question = (f"u{user}-{number}", f"user {user}"), f"Question {number % 4}?"
            comparisons.append(choice(*names, f"r{one}", f"r{other}", question, profile=profile))
    return comparisons


def choice(
    id: str, user: str | None, chosen: str, rejected: str, question: str = "?", **more: Any
) -> prb.Comparison:
    """A comparison of two responses."""
    return prb.Comparison(id=id, user_id=user, question=question, chosen=chosen, rejected=rejected, **more)
