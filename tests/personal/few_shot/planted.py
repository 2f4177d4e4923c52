"""People whose rewards are known: choices drawn from a planted model, and how well scores do against it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from prb_jax.personal.few_shot.choices import AdapterTrainer, Choices, Posts, UserRows, contexts_and_queries
from prb_jax.personal.few_shot.fitting import ChoicePairs, fit_direction
from prb_jax.personal.few_shot.protocol import Fitted, Method, adapt_users, repeated, score_users


def sigmoid(x: Any) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def choices_of(features: Any, chosen: Any, rejected: Any, **others: Any) -> Choices:
    """Choices between rows of features, each on a question of its own, of one user unless ``users`` are given."""
    count = len(chosen)
    fields = {"users": np.zeros(count, np.int32), "questions": np.arange(count, dtype=np.int32)} | others
    fields.setdefault("number_of_users", int(max(fields["users"])) + 1)
    return Choices(features, np.asarray(chosen), np.asarray(rejected), **fields)


@dataclass(frozen=True)
class World:
    """Choices of seen people, of a validation part and of new people, and the rewards that they were drawn from; the
    users are numbered through."""

    seen: Choices
    validation: Choices
    new: Choices
    rewards: np.ndarray  # float64 [U, R], the planted reward of every response for every user
    contexts: UserRows  # of the new people
    queries: UserRows

    def query_margins(self) -> np.ndarray:
        """float64 [m]: the planted margin of the chosen response of every query."""
        queries, users = self.queries.places[self.queries.mask], self.queries.users
        users = np.broadcast_to(users[:, None], self.queries.mask.shape)[self.queries.mask]
        return self.rewards[users, self.new.chosen[queries]] - self.rewards[users, self.new.rejected[queries]]

    def share_of_bayes(self, scores: np.ndarray) -> float:
        """The expected accuracy of scores [U, q, 2] of the queries, relative to that of the planted rewards."""
        planted, ours = self.query_margins(), (scores[..., 0] - scores[..., 1])[self.queries.mask]
        right = np.where(ours == 0, 0.5, np.where(ours > 0, sigmoid(planted), sigmoid(-planted)))
        return float(right.mean() / sigmoid(np.abs(planted)).mean())

    def share(self, method: Method, fitted: Fitted, shots: int, *, width: int) -> float:
        """The share of the Bayes accuracy after ``shots`` comparisons of each new person."""
        return self.share_of_bayes(self.scores(method, fitted, shots, width=width))

    def scores(self, method: Method, fitted: Fitted, shots: int, *, width: int) -> np.ndarray:
        """The scores [U, q, 2] of the queries after ``shots`` comparisons of each new person."""
        rows = self.contexts.first(shots, width=width)
        states = adapt_users(method, fitted, self.new, rows, key=jax.random.key(1))
        return score_users(method, fitted, states, self.new, self.queries)

    def share_of_nobody(self, method: Method, fitted: Fitted) -> float:
        """The share of the Bayes accuracy when nothing is known of anybody."""
        states = repeated(method.empty_state(fitted), len(self.queries.users))
        return self.share_of_bayes(score_users(method, fitted, states, self.new, self.queries))


def world(
    features: np.ndarray,
    rewards: np.ndarray,
    *,
    seed: int = 0,
    seen: int = 60,
    validation: int = 20,
    choices: int = 32,
    new_choices: int = 64,
    pool: int | None = None,
    **tables: Any,
) -> World:
    """Draw the choices of U users among R responses: the first ``seen`` are seen, the next ones the validation part.

    Nobody meets a response twice.

    Args:
      features: float32 [R, D].
      rewards: [U, R].
      seed: of pairs and choices.
      seen, validation: people of each part; the rest are new.
      choices: of each seen person.
      new_choices: of each other person; half of them are queries.
      pool: distinct pairs, where people share them.
      tables: further fields of `Choices`.
    """
    rng = np.random.default_rng(seed)
    users, rows = rewards.shape
    counts = np.where(np.arange(users) < seen, choices, new_choices)
    who = np.repeat(np.arange(users), counts).astype(np.int32)
    pairs = rng.permutation(rows)[: rows // 2 * 2].reshape(2, -1)
    drawn = [
        pairs[:, rng.permutation(pool)[:count]]
        if pool is not None
        else rng.permutation(rows)[: 2 * count].reshape(2, count)
        for count in counts
    ]
    first, second = np.concatenate(drawn, axis=1)
    swap = rng.random(len(who)) > sigmoid(rewards[who, first] - rewards[who, second])
    chosen, rejected = (
        np.where(swap, *sides).astype(np.int32) for sides in ((second, first), (first, second))
    )
    tables |= {"users": who, "number_of_users": users}
    every = choices_of(features.astype(np.float32), chosen, rejected, **tables)
    part = np.digitize(who, [seen, seen + validation])
    new = every.only(part == 2)
    contexts, queries = contexts_and_queries(new, seed=0)
    return World(every.only(part == 0), every.only(part == 1), new, rewards, contexts, queries)


def with_posts(made: World, posts: Posts | None) -> World:
    """The same people with profiles."""
    return with_tables(made, posts=posts)


def with_tables(made: World, **tables: Any) -> World:
    """The same people with these fields of their choices."""
    parts = {name: replace(getattr(made, name), **tables) for name in ("seen", "validation", "new")}
    return replace(made, **parts)


class LinearBackbone:
    """A backbone that can be trained, whose reward is linear in its features: an adapter is a direction.

    Args:
      features: float32 [R, D].
    """

    def __init__(self, features: np.ndarray) -> None:
        self.features = features

    def trainer(self, pairs: np.ndarray, *, settings: Any, steps: int, seed: int) -> AdapterTrainer:
        deltas = self.features[pairs[:, 0]] - self.features[pairs[:, 1]]
        nobody = np.zeros(len(pairs), np.int32)

        def train(members: np.ndarray, start: Any = None) -> Any:
            weights = np.bincount(members, minlength=len(pairs)).astype(np.float32)
            first = np.zeros(deltas.shape[1], np.float32) if start is None else start["direction"]
            direction = fit_direction(
                ChoicePairs(deltas, nobody, weights), np.float32(1e-2), first, steps=steps
            )
            return {"direction": np.asarray(direction)}

        return train

    def rewards(self, adapters: Any, *, settings: Any) -> np.ndarray:
        return self.features @ adapters["direction"].T
