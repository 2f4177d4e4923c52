"""The bodies of the kernels of :mod:`prb_jax.models.attention.triton`: what one program computes.

A program holds one block, and ``ranges`` names for every held block the ones that it visits: [held blocks, n, 2].
Arrays of queries and keys are whole, [T, H] of one tree and head; ``first`` int32 [B] has each tree's first real
token. T need not be a multiple of a block: what is read beyond is zero, and never written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from prb_jax.models.attention.blocks import MASKED
from prb_jax.models.layers import matmul_precision
from prb_jax.trees.mask import TreeMask


@dataclasses.dataclass(frozen=True)
class KernelBlocks:
    """How a kernel is cut up.

    Attributes:
        held: tokens that a program holds all the time.
        visited: tokens of one step of its walk.
        warps: of a program; its float32 sums lie in their registers.
        stages: steps whose reads are under way at a time.
    """

    held: int
    visited: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class KernelScores:
    """Which scores count, and how they are changed, in a kernel with those blocks."""

    mask: TreeMask
    softcap: float | None
    blocks: KernelBlocks

    def visible(self, query: jax.Array, key: jax.Array, first: jax.Array) -> jax.Array:
        """bool [queries, keys] of their indices."""
        inside = self.mask.layout.inside(query)
        return self.mask.sees(query[:, None], key[None], inside[:, None]) & (key >= first)[None]

    def capped(self, scores: jax.Array) -> jax.Array:
        """Scores after the soft cap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


def write_output(
    ranges: Any, first: Any, q: Any, k: Any, v: Any, out: Any, log: Any, *, scores: KernelScores
) -> None:
    """A block of queries: softmax of its scores times values, and the logarithms of the denominators."""
    blocks = scores.blocks
    held, first = pl.program_id(0), first[pl.program_id(2)]
    query = _index(held, blocks.held)
    rows = _read(q, held, blocks.held)

    def step(block: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total_out, top, total = sums
        key = _index(block, blocks.visited)
        visible = scores.visible(query, key, first)
        found = jnp.where(
            visible, scores.capped(_dot(rows, _read(k, block, blocks.visited), trans_b=True)), MASKED
        )
        higher = jnp.maximum(top, found.max(axis=1))
        # Also zero where a query has seen nothing so far, and its top is that of hidden keys.
        weights = jnp.where(visible, jnp.exp(found - higher[:, None]), 0.0)
        shrink = jnp.exp(top - higher)
        total_out = total_out * shrink[:, None] + _dot(
            weights.astype(v.dtype), _read(v, block, blocks.visited)
        )
        return total_out, higher, total * shrink + weights.sum(axis=1)

    start = (
        jnp.zeros((blocks.held, q.shape[-1]), jnp.float32),
        jnp.full((blocks.held,), MASKED, jnp.float32),
        jnp.zeros((blocks.held,), jnp.float32),
    )
    sums = _walk(ranges, held, step, start, low=first // blocks.visited)
    total_out, top, total = sums
    total = jnp.where(total > 0, total, 1.0)
    _write(out, held, blocks.held, total_out / total[:, None])
    _write(log, held, blocks.held, top + jnp.log(total))


def write_gradient_by_queries(
    ranges: Any, first: Any, q: Any, k: Any, v: Any, pulled: Any, log: Any, inner: Any, to_q: Any, *,
    scores: KernelScores,
) -> None:  # fmt: skip
    """A block of queries; ``pulled`` is the cotangent of the output, ``inner`` its product with the output."""
    blocks = scores.blocks
    held, first = pl.program_id(0), first[pl.program_id(2)]
    query = _index(held, blocks.held)
    rows, pulled_rows, logs, inners = (_read(x, held, blocks.held) for x in (q, pulled, log, inner))

    def step(block: jax.Array, total: jax.Array) -> jax.Array:
        key = _index(block, blocks.visited)
        keys, values = (_read(x, block, blocks.visited) for x in (k, v))
        visible = scores.visible(query, key, first)
        _, gradient = _score_gradient(scores, rows, keys, values, pulled_rows, visible, logs, inners)
        return total + _dot(gradient, keys)

    start = jnp.zeros((blocks.held, q.shape[-1]), jnp.float32)
    _write(to_q, held, blocks.held, _walk(ranges, held, step, start, low=first // blocks.visited))


def write_gradients_by_keys(
    ranges: Any, first: Any, q: Any, k: Any, v: Any, pulled: Any, log: Any, inner: Any, to_k: Any, to_v: Any, *,
    scores: KernelScores,
) -> None:  # fmt: skip
    """A block of keys; q and ``pulled`` [T, group, H], ``log`` and ``inner`` [group, T] are of all its query heads."""
    blocks = scores.blocks
    held, first = pl.program_id(0), first[pl.program_id(2)]
    key = _index(held, blocks.held)
    keys, values = (_read(x, held, blocks.held) for x in (k, v))
    # Keys that are padding are seen by nobody.
    real = (held + 1) * blocks.held > first

    def of_head(head: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def step(block: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            query = _index(block, blocks.visited)
            rows, pulled_rows, logs, inners = (
                _read(x, block, blocks.visited, head) for x in (q, pulled, log, inner)
            )
            visible = scores.visible(query, key, first)
            weights, gradient = _score_gradient(
                scores, rows, keys, values, pulled_rows, visible, logs, inners
            )
            total_k, total_v = sums
            return (
                total_k + _dot(gradient, rows, trans_a=True),
                total_v + _dot(weights, pulled_rows, trans_a=True),
            )

        return _walk(ranges, held, step, sums, real=real)

    zeros = jnp.zeros((blocks.held, k.shape[-1]), jnp.float32)
    total_k, total_v = lax.fori_loop(0, q.shape[1], of_head, (zeros, zeros))
    _write(to_k, held, blocks.held, total_k)
    _write(to_v, held, blocks.held, total_v)


def _score_gradient(
    scores: KernelScores,
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pulled: jax.Array,
    visible: jax.Array,
    log: jax.Array,
    inner: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """[queries, keys] in the factors' dtype: the weights, and the gradient by the scores."""
    capped = scores.capped(_dot(rows, keys, trans_b=True))
    # A query that sees nothing has no denominator, so that hidden scores are taken out before the exponential.
    weights = jnp.exp(jnp.where(visible, capped - log[:, None], MASKED))
    gradient = weights * (_dot(pulled, values, trans_b=True) - inner[:, None])
    if scores.softcap is not None:
        gradient = gradient * (1.0 - jnp.square(capped / scores.softcap))
    return weights.astype(rows.dtype), gradient.astype(rows.dtype)


def _walk(
    ranges: Any,
    held: jax.Array,
    step: Callable[..., Any],
    sums: Any,
    *,
    low: jax.Array | None = None,
    real: jax.Array | None = None,
) -> Any:
    """sums = step(block, sums) for every block that ``held`` visits, from block ``low`` on, and if it is ``real``."""

    def of_range(index: jax.Array, sums: Any) -> Any:
        start, stop = ranges[held, index, 0], ranges[held, index, 1]
        start = start if low is None else jnp.maximum(start, low)
        stop = stop if real is None else jnp.where(real, stop, start)
        return lax.fori_loop(start, stop, step, sums)

    return lax.fori_loop(0, ranges.shape[1], of_range, sums)


def _index(block: jax.Array, size: int) -> jax.Array:
    """int32 [size], the tokens of a block."""
    return block * size + jnp.arange(size)


def _read(x: Any, block: jax.Array, size: int, head: jax.Array | None = None) -> jax.Array:
    """The rows of a block of x [T, ...], zeros beyond T; of x [T, heads, H] or [heads, T], those of one head."""
    there, rows = _rows(x, block, size, head)
    return triton.load(rows, mask=there, other=None if there is None else 0.0)


def _write(x: Any, block: jax.Array, size: int, values: jax.Array) -> None:
    """Writes the rows that :func:`_read` reads."""
    there, rows = _rows(x, block, size, None)
    triton.store(rows, values.astype(x.dtype), mask=there)


def _rows(x: Any, block: jax.Array, size: int, head: jax.Array | None) -> tuple[jax.Array | None, Any]:
    """Which rows there are, None for all, and a view of them: of one step, Triton's lowering takes no more."""
    rows: Any = pl.ds(block * size, size)
    if head is None:
        tokens, view = x.shape[0], x.at[rows]
    elif x.ndim == 3:
        tokens, view = x.shape[0], x.at[rows, head]
    else:
        tokens, view = x.shape[1], x.at[head, rows]
    if tokens % size == 0:
        return None, view
    return (_index(block, size) < tokens).reshape(size, *(1 for _ in view.shape[1:])), view


def _dot(a: jax.Array, b: jax.Array, *, trans_a: bool = False, trans_b: bool = False) -> jax.Array:
    """A product with float32 sums."""
    return triton.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=matmul_precision(a.dtype))
