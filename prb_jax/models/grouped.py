"""Products of rows with one of several matrices, for mixtures of experts.

Rows with the same matrix form a group (:func:`group_rows`). On TPUs and GPUs a product is
:func:`jax.lax.ragged_dot`. With it, XLA for CPUs would multiply every row by every matrix, so on CPUs a loop walks
through tiles of rows, each within one group. The number of tiles is data: one program serves any choice of experts.

Dimensions: T tokens, k choices per token, E matrices, R rows; I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from prb_jax.models.layers import from_bits, in_bits, matmul_precision, product, row_of

MOST_ROWS, LEAST_ROWS = 128, 8
"""Maximum and minimum number of rows of a tile in the loop."""


class Groups(NamedTuple):
    """Assignment of rows to matrices. All arrays are int32."""

    sizes: jax.Array  # [E], rows of each group, blank rows included
    owners: jax.Array  # [R], matrix of each row
    tokens: jax.Array  # [R], token of each row; T for a blank row
    places: jax.Array  # [T, k], row of each choice; R if its matrix is not included
    tile: int | None  # rows per tile of the loop; None for ragged_dot


def group_rows(chosen: jax.Array, count: int, *, of: int, loops: bool) -> Groups:
    """Sort the choices of tokens by matrix.

    Args:
        chosen: Matrices of each token, int32 [T, k]; numbers outside 0 to ``count`` - 1 are ignored.
        count: E, the number of matrices here.
        of: Total number of matrices from which tokens choose.
        loops: If True, products are loops over tiles, and groups are padded to whole tiles.
    """
    tokens, each = chosen.shape
    tile = None
    if loops:
        usual = max(1, tokens * each // of)
        tile = min(MOST_ROWS, max(LEAST_ROWS, 1 << (usual.bit_length() - 1)))
    flat = chosen.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.zeros(count + 1, jnp.int32).at[flat].add(1)
    filled = counts[:count] if tile is None else -(-counts[:count] // tile) * tile
    rows = tokens * each if tile is None else (tokens * each // tile + count) * tile
    ends = jnp.cumsum(filled)
    # Start of each group in rows and in the sorted choices; ignored choices follow the last group.
    starts = jnp.append(ends - filled, rows)
    before = jnp.cumsum(counts) - counts
    by_choice = flat[order]
    row = starts[by_choice] + jnp.arange(len(flat)) - before[by_choice]
    row = jnp.where(by_choice < count, row, rows)
    return Groups(
        sizes=filled,
        owners=jnp.minimum(jnp.searchsorted(ends, jnp.arange(rows), side="right"), count - 1),
        tokens=jnp.full(rows, tokens, jnp.int32).at[row].set(order // each, mode="drop"),
        places=jnp.zeros(len(flat), jnp.int32).at[order].set(row).reshape(tokens, each),
        tile=tile,
    )


@jax.custom_vjp
def _gathered(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """Return x[there], zeros for missing entries; ``back`` [len(x), n] contains the positions of each entry."""
    return jnp.take(x, there, axis=0, mode="fill", fill_value=0)


# The derivative is also a gather; by default JAX would add up rows one by one.
def _gathered_backward(back: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    gathered = jnp.take(cotangent, back, axis=0, mode="fill", fill_value=0)
    return gathered.astype(jnp.float32).sum(axis=1).astype(cotangent.dtype), None, None


_gathered.defvjp(lambda x, there, back: (_gathered(x, there, back), back), _gathered_backward)


def spread(x: jax.Array, groups: Groups) -> jax.Array:
    """Return the rows [R, D] of tokens x [T, D]; blank rows are zeros."""
    return _gathered(x, groups.tokens, groups.places)


def combined(rows: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    """Return the weighted sum of each token's rows [R, D], with weights float32 [T, k]: float32 [T, D]."""
    tokens, each = groups.places.shape
    # Each row is one choice: its index among all choices, or an index beyond them for a blank row.
    choices = jnp.full(len(rows), tokens * each, jnp.int32)
    choices = choices.at[groups.places.reshape(-1)].set(jnp.arange(tokens * each), mode="drop")
    taken = _gathered(rows, groups.places.reshape(-1), choices[:, None])
    return jnp.sum(taken.reshape(tokens, each, -1).astype(jnp.float32) * weights[..., None], axis=1)


def grouped_product(rows: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
    """Multiply each row of rows [R, I] by its group's matrix in weight [E, I, O]: float32 [R, O].

    Both factors are in the dtype of rows; sums are float32, or int32 for int8 factors.
    """
    return _grouped_product(groups.tile, rows, weight, groups.sizes, groups.owners)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_product(
    tile: int | None, rows: jax.Array, weight: jax.Array, sizes: jax.Array, owners: jax.Array
) -> jax.Array:
    return _products(tile, rows, weight.astype(rows.dtype), sizes, owners)


# Same as :func:`prb_jax.models.layers.matmul`: narrow factors in both passes, and nothing kept for frozen weights.
def _forward(tile: int | None, rows: Any, weight: Any, sizes: Any, owners: Any) -> tuple[jax.Array, Any]:
    kept_rows = rows.value if weight.perturbed else None
    kept_weight = weight.value if rows.perturbed else None
    kinds = (jnp.zeros((0,), rows.value.dtype), jnp.zeros((0,), weight.value.dtype))
    out: Any = _grouped_product(tile, rows.value, weight.value, sizes.value, owners.value)
    return out, (kept_rows, kept_weight, sizes.value, owners.value, *kinds)


def _backward(tile: int | None, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    rows, weight, sizes, owners, like_rows, like_weight = kept
    if isinstance(cotangent, SymbolicZero):
        return None, None, None, None
    narrow = cotangent.astype(like_rows.dtype)
    to_rows = to_weight = None
    if weight is not None:
        turned = weight.astype(like_rows.dtype).swapaxes(1, 2)
        to_rows = _products(tile, narrow, turned, sizes, owners).astype(like_rows.dtype)
    if rows is not None:
        to_weight = _outer_products(tile, rows, narrow, sizes, owners).astype(like_weight.dtype)
    return to_rows, to_weight, None, None


_grouped_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _products(
    tile: int | None, rows: jax.Array, weight: jax.Array, sizes: jax.Array, owners: jax.Array
) -> jax.Array:
    kind = jnp.int32 if rows.dtype == jnp.int8 else jnp.float32
    if tile is None:
        precision = matmul_precision(rows.dtype)
        out = lax.ragged_dot(rows, weight, sizes, precision=precision, preferred_element_type=kind)
        return out.astype(jnp.float32)

    bits = in_bits(rows)
    multiply = product if kind == jnp.float32 else functools.partial(jnp.matmul, preferred_element_type=kind)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        start = number * tile
        matrix = row_of(weight, owners[start])
        some = from_bits(lax.dynamic_slice_in_dim(bits, start, tile), rows.dtype)
        new = multiply(some, matrix)
        return lax.dynamic_update_slice_in_dim(out, new.astype(jnp.float32), start, 0)

    return lax.fori_loop(0, sizes.sum() // tile, step, jnp.zeros((len(rows), weight.shape[-1]), jnp.float32))


def _outer_products(
    tile: int | None, rows: jax.Array, towards: jax.Array, sizes: jax.Array, owners: jax.Array
) -> jax.Array:
    """Return, for each group, the sum of outer products of its rows [R, I] and [R, O]: float32 [E, I, O]."""
    if tile is None:
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        return lax.ragged_dot_general(
            rows, towards, sizes, numbers, precision=matmul_precision(rows.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    bits = in_bits(rows), in_bits(towards)

    def step(number: jax.Array, total: jax.Array) -> jax.Array:
        start = number * tile
        some, others = (from_bits(lax.dynamic_slice_in_dim(x, start, tile), rows.dtype) for x in bits)
        owner = owners[start]
        more = lax.dynamic_index_in_dim(total, owner, keepdims=False) + product(some, others, (0, 0))
        return lax.dynamic_update_index_in_dim(total, more, owner, 0)

    nothing = jnp.zeros((len(sizes), rows.shape[1], towards.shape[1]), jnp.float32)
    return lax.fori_loop(0, sizes.sum() // tile, step, nothing)
