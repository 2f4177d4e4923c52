"""Controls of a fitted method: its accuracy when its knowledge of a person is missing, of another person, or wrong."""

from __future__ import annotations

import jax
import numpy as np

from prb_jax.personal.few_shot.choices import Choices, UserRows
from prb_jax.personal.few_shot.protocol import (
    Fitted,
    Method,
    State,
    accuracy,
    adapt_users,
    repeated,
    score_users,
)


def accuracy_of(method: Method, fitted: Fitted, states: State, choices: Choices, queries: UserRows) -> float:
    """Return the share of queries whose chosen response has the higher score under ``states``."""
    return accuracy(score_users(method, fitted, states, choices, queries))


def without_user(method: Method, fitted: Fitted, choices: Choices, queries: UserRows) -> float:
    """Return the accuracy when nothing is known of anybody."""
    states = repeated(method.empty_state(fitted), len(queries.users))
    return accuracy_of(method, fitted, states, choices, queries)


def shuffled_users(
    method: Method, fitted: Fitted, choices: Choices, contexts: UserRows, queries: UserRows, key: jax.Array
) -> float:
    """Return the accuracy when every person has the comparisons and the profile of another person."""
    order = np.roll(np.arange(len(contexts.users)), 1)
    states = adapt_users(method, fitted, choices, contexts, key=key)
    other = jax.tree.map(lambda leaf: leaf[order], states)
    return accuracy_of(method, fitted, other, choices, queries)


def swapped_labels(
    method: Method, fitted: Fitted, choices: Choices, contexts: UserRows, queries: UserRows, key: jax.Array
) -> float:
    """Return the accuracy when the person is said to have chosen the response that they rejected."""
    states = adapt_users(method, fitted, choices.turned_round(), contexts, key=key)
    return accuracy_of(method, fitted, states, choices, queries)
