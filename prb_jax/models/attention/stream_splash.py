"""Attention over packed streams on TPUs, forward and backward: JAX's Pallas splash kernel with the streams' own tables.

:mod:`prb_jax.models.attention.splash` gives the kernel the tables of one padded shape, which are fixed. Here they come
with each batch (:mod:`prb_jax.trees.kernel_tables`): the kernel visits the blocks in which tokens of the streams see
each other, and no others, and nothing is moved into padded rows and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import Mesh

from prb_jax.models.attention.splash import KeyedMask, make_kernel
from prb_jax.models.attention.streams import one_by_one, over_mesh
from prb_jax.trees.kernel_tables import KernelLayout, KernelTable


def splash_stream_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    table: KernelTable,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As :func:`prb_jax.models.attention.streams.stream_attention`, by a kernel for TPUs.

    Products have factors of q's dtype and float32 sums, the softmax is float32. Padding sees itself alone.

    Args:
        q, k, v, window, softcap, mesh: as given there.
        table: of the streams, and of this window.
        interpret: run the kernel's steps by XLA, on any machine, to test it.
    """
    attend = functools.partial(_attend, window=window, softcap=softcap, interpret=interpret)
    return over_mesh(attend, mesh)(q, k, v, table)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: KernelTable,
    *,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> jax.Array:
    """As :func:`splash_stream_attention`, on one device."""
    tokens, heads = q.shape[1:3]
    options = _kernel_options(table.layout, tokens, heads, window, softcap, interpret)

    def stream(args: tuple[jax.Array, jax.Array, jax.Array, KernelTable]) -> jax.Array:
        q, k, v, tables = args

        def visited(numbers: Any, steps: Any) -> MaskInfo:
            return MaskInfo(
                data_next=numbers[None],
                mask_next=None,
                block_mask=steps[None],
                partial_mask_blocks=None,
                q_sequence=tables.packed,  # pyright: ignore[reportArgumentType]
            )

        forward, backward = (
            visited(tables.keys, tables.key_steps),
            visited(tables.queries, tables.query_steps),
        )
        kernel = splash.SplashAttentionKernel(forward, forward, backward, **options)
        by_head = (x.transpose(1, 0, 2) for x in (q, k, v))
        trees: Any = tables.trees
        out: Any = kernel(*by_head, splash.SegmentIds(trees, trees))
        return out.transpose(1, 0, 2).astype(q.dtype)

    return one_by_one(stream, (q, k, v, table))


@functools.lru_cache(maxsize=256)
def _kernel_options(
    layout: KernelLayout, tokens: int, heads: int, window: int | None, softcap: float | None, interpret: bool
) -> dict[str, Any]:
    """All that a kernel is told but its tables: those of a kernel for a single block."""
    mask = _Mask(layout, tokens, window)
    return make_kernel(mask, heads, softcap, layout.block, shards=1, interpret=interpret).kwargs


class _Mask(KeyedMask):
    """Who sees whom within a tree, as the kernel wants it; trees are told apart by their numbers."""

    def __init__(self, layout: KernelLayout, tokens: int, window: int | None) -> None:
        places = np.arange(layout.block, dtype=np.int32)
        super().__init__((layout, tokens, window), tree_sight(layout, tokens, window), places)


def tree_sight(layout: KernelLayout, tokens: int, window: int | None) -> Callable[[Any, Any], Any]:
    """Return a function of (packed queries, places of keys), bool: the query sees the key, if it is of the same tree.

    Args:
        layout, tokens: static facts of a stream.
        window: a token sees only the ``window`` last tokens of its conversation, itself included; None for all.
    """

    def sees(packed: Any, key: Any) -> Any:
        place, own, hidden = layout.unpack(packed, tokens)
        before = key < own - hidden
        visible = (key <= place) & (before | (key >= own))
        if window is None:
            return visible
        return visible & (place - key - before * hidden < window)

    return sees
