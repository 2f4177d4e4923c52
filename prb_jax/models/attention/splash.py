"""Attention over padded trees on TPUs by JAX's Pallas splash kernel, forward and backward.

The mask is computed inside the kernel from the indices of its block, and blocks that nobody sees (later
ones, siblings, those outside the window) are never visited. Padding left of the prefix is a segment of
its own. Nothing of the size T x T exists at any time. Kernels are opaque to the partitioner, so on a mesh every device
runs its own: trees are split over the axes of the batch, heads over ``tensor`` and queries over ``sequence``, where
every device has all keys.

The tables of blocks to visit are fixed for one shape of trees. Packed streams have a kernel of their own,
:mod:`prb_jax.models.attention.stream_kernel`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prb_jax.models.attention.blockwise import ATTENTION_RESULTS
from prb_jax.sharding import RULES
from prb_jax.trees.batches import Bucket, TreeMask
from prb_jax.trees.stream_tables import LANES, STEP_BLOCK


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bucket: Bucket,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
    block: int = STEP_BLOCK,
    interpret: bool = False,
) -> jax.Array:
    """The same as :func:`prb_jax.models.attention.blockwise.blockwise_attention`, by a kernel for TPUs.

    Products have factors of q's dtype and float32 sums, the softmax is float32.

    Args:
        mesh: over which trees, heads and queries are split; None for one device.
        block: queries and keys of one step of the kernel, a multiple of 128.
        interpret: run the kernel's steps by XLA, on any machine, to test it.
    """
    shards = 1 if mesh is None else mesh.shape["sequence"]
    block = _block_size(bucket.tokens, block, shards)
    heads = q.shape[2] // (1 if mesh is None else mesh.shape["tensor"])
    kernel = _tree_kernel(TreeMask(bucket, window), heads, softcap, block, shards, interpret)

    tokens = _tokens(bucket.tokens, block, shards)
    padding = ((0, 0), (0, tokens - bucket.tokens), (0, 0), (0, 0))
    by_head = [jnp.pad(x, padding).transpose(0, 2, 1, 3) for x in (q, k, v)]
    # Real tokens are segment 1; padding sees and is seen by padding alone, so no softmax is empty.
    index = jnp.arange(tokens)
    segments = index[None] >= bucket.prefix - prefix_lengths[:, None]
    segments = (segments & (index < bucket.tokens)).astype(jnp.int32)

    def attend(
        kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, mine: jax.Array, others: jax.Array
    ) -> Any:
        """q [B, N, t, H], k and v [B, G, T, H], segments [B, t] and [B, T] -> [B, N, t, H]: t of the T queries."""
        return jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, splash.SegmentIds(*ids)))(q, k, v, mine, others)

    run: Any = attend
    if mesh is not None and mesh.size > 1:
        rows, split = RULES["batch"], RULES["heads"]
        of_queries = PartitionSpec(rows, split, RULES["tokens"])
        of_keys = PartitionSpec(rows, split)
        of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, RULES["tokens"])))
        segment_specs = (PartitionSpec(rows, RULES["tokens"]), PartitionSpec(rows))
        run = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(of_kernel, of_queries, of_keys, of_keys, *segment_specs),
            out_specs=of_queries,
            check_vma=False,  # the kernel does not say over which axes its results vary
        )
    out = run(kernel, *by_head, segments, segments)
    return out.transpose(0, 2, 1, 3)[:, : bucket.tokens].astype(q.dtype)


def visited_share(mask: TreeMask, *, block: int = STEP_BLOCK) -> float:
    """The share of the steps of the kernel's grid that have anything to compute.

    The grid has a row for each block of queries, as wide as the row with the most blocks of keys.
    """
    block = _block_size(mask.bucket.tokens, block, 1)
    table = np.asarray(_tree_kernel(mask, 1, None, block, 1, False).fwd_mask_info.block_mask)
    return np.count_nonzero(table) / table.size


def _block_size(tokens: int, largest: int, shards: int) -> int:
    """A smaller block where the largest one would be mostly empty."""
    return min(largest, LANES * math.ceil(tokens / (shards * LANES)))


def _tokens(tokens: int, block: int, shards: int) -> int:
    """``tokens`` rounded up to whole blocks on every shard."""
    return math.ceil(tokens / (block * shards)) * block * shards


@functools.lru_cache(maxsize=256)
def _tree_kernel(
    mask: TreeMask, heads: int, softcap: float | None, block: int, shards: int, interpret: bool
) -> Any:
    """JAX's kernel with its tables of blocks to visit, which depend on shapes only; the same for each query head.

    A step takes ``block`` queries and as many keys; a mesh splits the queries into ``shards`` parts.

    Tokens that were appended to fill the last block see themselves. For each query the kernel hands one number to the
    mask's function, so column and place inside the response are packed into one.
    """
    bucket = mask.bucket
    tokens = _tokens(bucket.tokens, block, shards)
    column = np.arange(tokens, dtype=np.int32)
    inside = np.where(column < bucket.tokens, bucket.inside(column), column - bucket.tokens)
    low = tokens.bit_length()
    if low + int(inside.max()).bit_length() > 31:
        raise ValueError(
            f"attention over {tokens} tokens with responses of {bucket.response_length}: "
            "index and place inside the response do not fit into 31 bits"
        )

    def sees(packed: Any, key: Any) -> Any:
        query = packed & ((1 << low) - 1)
        visible = mask.sees(query, key, packed >> low)
        if tokens == bucket.tokens:
            return visible
        return visible & ((query < bucket.tokens) | (key >= bucket.tokens))

    seen = _ComputedMask((tokens, tokens), sees)
    seen.q_sequence = (column | inside << low).astype(np.int32)
    sides = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    # The tables are data, not part of whatever is being traced.
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            masks.MultiHeadMask([seen] * heads),
            block_sizes=splash.BlockSizes(**dict.fromkeys(sides, block)),
            head_shards=1,
            q_seq_shards=shards,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=ATTENTION_RESULTS[0],
            interpret=interpret,
        )


class _ComputedMask(masks._ComputableMask):
    """A mask that is computed in the kernel; equal to itself alone."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
