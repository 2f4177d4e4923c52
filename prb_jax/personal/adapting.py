"""Compiled functions of a few-shot method for people who come one after another: few shapes, so few programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np

from prb_jax.personal.few_shot.choices import Context, Responses
from prb_jax.personal.few_shot.protocol import Fitted, Method

BATCH: Final = 256
"""Rows of a compiled call."""


def rounded(number: int) -> int:
    """Return the next power of two, so that few programs are compiled."""
    return 1 << (number - 1).bit_length()


def in_batches(run: Callable[..., Any], rows: tuple[Any, ...]) -> Any:
    """Return the results of a compiled function over rows, in batches of one size; the last one is filled up."""
    count = len(jax.tree.leaves(rows)[0])
    size = min(BATCH, rounded(count))
    found = []
    for start in range(0, count, size):
        index = np.minimum(np.arange(start, start + size), count - 1)
        found.append(jax.tree.map(np.asarray, run(*jax.tree.map(lambda leaf, i=index: leaf[i], rows))))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *found)


@functools.partial(jax.jit, static_argnums=0)
def adapt_rows(method: Method, fitted: Fitted, contexts: Context) -> Any:
    """Return the states of people, each leaf with a leading axis as that of the contexts."""
    return jax.vmap(lambda context: method.adapt(fitted, context, jax.random.key(0)))(contexts)


@functools.partial(jax.jit, static_argnums=0)
def score_rows(method: Method, fitted: Fitted, states: Any, responses: Responses) -> jax.Array:
    """Return float32 [n, K]: the scores of each row of responses under its own state."""
    return jax.vmap(lambda state, row: method.score(fitted, state, row))(states, responses)


@functools.partial(jax.jit, static_argnums=0)
def score_table(
    method: Method, fitted: Fitted, states: Any, people: jax.Array, responses: Responses
) -> jax.Array:
    """Return float32 [people, n, K]: the scores of every row of responses under every state.

    ``people`` [people] are any numbers: the states of a method that knows no person have no axis to tell how many.
    """

    def of_person(state: Any, person: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: method.score(fitted, state, row))(responses)

    return jax.vmap(of_person)(states, people)
