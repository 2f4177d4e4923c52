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
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import Mesh, PartitionSpec

from prb_jax.models.attention.blockwise import ATTENTION_RESULTS
from prb_jax.sharding import RULES
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
    """Return the attention of every token to the tokens that it may see, [S, N, heads, H] in q's dtype.

    Products have factors of q's dtype and float32 sums, the softmax is float32. Padding sees itself alone.

    Args:
        q: [S, N, heads, H], already scaled.
        k, v: [S, N, G, H].
        table: of the streams, and of this window.
        window: a token sees only the ``window`` last tokens, itself included.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before masking.
        mesh: over which streams and heads are split; None for one device.
        interpret: run the kernel's steps by XLA, on any machine, to test it.
    """
    attend: Any = functools.partial(_attend, window=window, softcap=softcap, interpret=interpret)
    if mesh is not None and mesh.size > 1:
        rows = PartitionSpec(RULES["batch"])
        split = PartitionSpec(RULES["batch"], None, RULES["heads"])
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(split, split, split, rows),
            out_specs=split,
            check_vma=False,  # the kernel does not say over which axes its results vary
        )
    return attend(q, k, v, table)


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
        q, k, v, own = args

        def visited(numbers: Any, steps: Any) -> MaskInfo:
            return MaskInfo(
                data_next=numbers[None],
                mask_next=None,
                block_mask=steps[None],
                partial_mask_blocks=None,
                q_sequence=own.packed,  # pyright: ignore[reportArgumentType]
            )

        forward, backward = visited(own.keys, own.key_steps), visited(own.queries, own.query_steps)
        kernel = splash.SplashAttentionKernel(forward, forward, backward, **options)
        by_head = (x.transpose(1, 0, 2) for x in (q, k, v))
        trees: Any = own.trees
        out: Any = kernel(*by_head, splash.SegmentIds(trees, trees))
        return out.transpose(1, 0, 2).astype(q.dtype)

    if len(q) == 1:
        return stream(jax.tree.map(lambda x: x[0], (q, k, v, table)))[None]
    return lax.map(stream, (q, k, v, table))


@functools.lru_cache(maxsize=256)
def _kernel_options(
    layout: KernelLayout, tokens: int, heads: int, window: int | None, softcap: float | None, interpret: bool
) -> dict[str, Any]:
    """All that a kernel is told but its tables: those of a kernel for a single block."""
    size = layout.block
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    mask = _Mask(layout, tokens, window)
    with jax.ensure_compile_time_eval():
        one = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=ATTENTION_RESULTS[0],
            interpret=interpret,
        )
    return one.kwargs


class _Mask(masks._ComputableMask):
    """Who sees whom within a tree, as the kernel wants it; trees are told apart by their numbers."""

    def __init__(self, layout: KernelLayout, tokens: int, window: int | None) -> None:
        self.key = (layout, tokens, window)
        super().__init__((layout.block, layout.block), tree_sight(layout, tokens, window))
        self.q_sequence = np.arange(layout.block, dtype=np.int32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


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
