"""Attention over trees on NVIDIA GPUs: Pallas kernels (Triton) with the tree's mask, forward and backward.

Every program of a kernel holds one block and walks through the blocks that it meets
(:mod:`prb_jax.models.attention.tree_blocks`): a block of queries through keys, for the output and the gradient by q; a
block of keys through queries, for the gradients by k and v. Blocks that nobody sees (later ones, siblings, those
outside the window, padding) are never read, and nothing of the size T x T exists.

The backward pass keeps the output and the logarithm of every softmax's denominator, and computes weights again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import Mesh, PartitionSpec

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.attention.blockwise import ATTENTION_RESULTS
from prb_jax.models.attention.tree_blocks import key_ranges, query_ranges
from prb_jax.models.attention.triton_kernels import (
    KernelBlocks,
    KernelScores,
    write_gradient_by_queries,
    write_gradients_by_keys,
    write_output,
)
from prb_jax.sharding import RULES
from prb_jax.trees.mask import TreeLayout, TreeMask

LEAST = 16  # tokens or columns: the least side of a product that tensor cores take

# The largest head dim of a row -> blocks forward and backward. What a program holds, and ``stages`` times what it
# visits, lies in shared memory, two arrays of each but for the queries of the forward pass: at most 96 KiB with two
# bytes a number, which fits into the 99 KiB of the smallest Ampere and Ada chips, and twice into the 227 KiB of
# Hopper. Sums and scores lie in registers: 128 x 128 float32 numbers over 8 warps are 64 of a thread's 255. Triton
# 3.9 compiles all of them within these limits for compute capabilities 8.0 and 9.0; none of them has been timed.
BLOCKS: Mapping[int, tuple[KernelBlocks, KernelBlocks]] = MappingProxyType(
    {
        64: (KernelBlocks(128, 64, warps=8, stages=3), KernelBlocks(64, 32, warps=4, stages=2)),
        128: (KernelBlocks(128, 64, warps=8, stages=2), KernelBlocks(64, 32, warps=8, stages=2)),
        256: (KernelBlocks(64, 32, warps=8, stages=2), KernelBlocks(32, 32, warps=8, stages=1)),
    }
)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static about a call."""

    forward: KernelScores
    backward: KernelScores
    interpret: bool


def triton_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layout: TreeLayout,
    prefix_lengths: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
    blocks: tuple[KernelBlocks, KernelBlocks] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The same as :func:`prb_jax.models.attention.blockwise.blockwise_attention`, by kernels for NVIDIA GPUs.

    Products have factors of q's dtype and float32 sums, the softmax is float32. A query that sees nothing
    (padding) gets zeros.

    Args:
        mesh: over which trees and heads are split; None for one device.
        blocks: forward and backward; those of :data:`BLOCKS` if not given.
        interpret: run the kernels' steps by XLA, on any machine, to test them.

    Raises:
        MeshError: the mesh splits the tokens of a tree.
        CheckpointError: a head dim beyond those of :data:`BLOCKS`.
    """
    check_kernel_mesh(mesh)
    head_dim = q.shape[-1]
    forward, backward = blocks or _blocks(head_dim, q.dtype, layout.tokens)
    mask = TreeMask(layout, window)
    plan = _Plan(KernelScores(mask, softcap, forward), KernelScores(mask, softcap, backward), interpret)
    # Tiles have powers of two. Columns of zeros change no score.
    columns = max(LEAST, pl.next_power_of_2(head_dim)) - head_dim
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, columns))) if columns else x for x in (q, k, v))
    first = (layout.prefix - prefix_lengths).astype(jnp.int32)

    attend: Any = functools.partial(_attend, plan)
    if mesh is not None and mesh.size > 1:
        # Kernels are opaque to the partitioner: every device runs its own.
        split = PartitionSpec(RULES["batch"], None, RULES["heads"])
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(split, split, split, PartitionSpec(RULES["batch"])),
            out_specs=split,
            check_vma=False,  # the kernels do not say over which axes their results vary
        )
    return attend(q, k, v, first)[..., :head_dim]


def check_kernel_mesh(mesh: Mesh | None) -> None:
    """Refuses a mesh that splits the tokens of a tree.

    Raises:
        MeshError: it does.
    """
    if mesh is not None and mesh.shape["sequence"] > 1:
        raise MeshError(
            f"mesh: the attention kernel for GPUs has all tokens of a tree on one device, found "
            f"sequence={mesh.shape['sequence']}: use sequence=1, or attention 'blockwise'"
        )


def _blocks(head_dim: int, dtype: jnp.dtype, tokens: int) -> tuple[KernelBlocks, KernelBlocks]:
    """Of the table; half as large for factors of four bytes, and never much larger than the tree."""
    rows = [row for row in BLOCKS if head_dim <= row]
    if not rows:
        raise CheckpointError(
            f"attention: the kernel for GPUs has heads of at most {max(BLOCKS)} numbers, found {head_dim}: "
            "use 'blockwise'"
        )
    most, parts = pl.next_power_of_2(tokens), 2 if jnp.dtype(dtype).itemsize > 2 else 1

    def fitted(blocks: KernelBlocks) -> KernelBlocks:
        held, visited = (max(LEAST, min(size // parts, most)) for size in (blocks.held, blocks.visited))
        return dataclasses.replace(blocks, held=held, visited=visited)

    forward, backward = BLOCKS[min(rows)]
    return fitted(forward), fitted(backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, G, H], first int32 [B] (the first real token) -> [B, T, N, H]."""
    return _forward(plan, q, k, v, first)[0]


def _attend_forward(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, log = _forward(plan, q, k, v, first)
    out, log = (checkpoint_name(x, name) for x, name in zip((out, log), ATTENTION_RESULTS, strict=True))
    return out, (q, k, v, first, out, log)


def _attend_backward(
    plan: _Plan, kept: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, first, out, log = kept
    # The softmax's derivative needs of a row only the sum of weight times derivative by weight.
    inner = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    (_, tokens, heads, size), kv_heads = q.shape, k.shape[2]
    mask, blocks = plan.backward.mask, plan.backward.blocks
    group = heads // kv_heads
    of_head, of_kv_head, line = _specs(tokens, size, group)
    (to_q,) = _call(
        write_gradient_by_queries, plan.backward, plan.interpret, heads,
        key_ranges(mask, queries=blocks.held, keys=blocks.visited), first,
        [(q, of_head), (k, of_kv_head), (v, of_kv_head), (cotangent, of_head), (log, line), (inner, line)],
        [(q, of_head)],
    )  # fmt: skip
    # Programs of one kv head each, which sum over the query heads that share it.
    one = pl.BlockSpec((None, tokens, None, size), lambda i, g, b: (b, 0, g, 0))
    several = pl.BlockSpec((None, tokens, group, size), lambda i, g, b: (b, 0, g, 0))
    lines = pl.BlockSpec((None, group, tokens), lambda i, g, b: (b, g, 0))
    to_k, to_v = _call(
        write_gradients_by_keys, plan.backward, plan.interpret, kv_heads,
        query_ranges(mask, queries=blocks.visited, keys=blocks.held), first,
        [(q, several), (k, one), (v, one), (cotangent, several), (log, lines), (inner, lines)],
        [(k, one), (v, one)],
    )  # fmt: skip
    return to_q, to_k, to_v, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output and float32 [B, N, T], the logarithms of the softmaxes' denominators."""
    mask, blocks, (rows, tokens, heads, size) = plan.forward.mask, plan.forward.blocks, q.shape
    of_head, of_kv_head, line = _specs(tokens, size, heads // k.shape[2])
    out, log = _call(
        write_output, plan.forward, plan.interpret, heads,
        key_ranges(mask, queries=blocks.held, keys=blocks.visited), first,
        [(q, of_head), (k, of_kv_head), (v, of_kv_head)],
        [(q, of_head), (jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32), line)],
    )  # fmt: skip
    return out, log


def _specs(tokens: int, size: int, group: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """What a program of one query head sees: of its arrays, of those of its kv head, and of its numbers a token."""
    return (
        pl.BlockSpec((None, tokens, None, size), lambda i, n, b: (b, 0, n, 0)),
        pl.BlockSpec((None, tokens, None, size), lambda i, n, b: (b, 0, n // group, 0)),
        pl.BlockSpec((None, None, tokens), lambda i, n, b: (b, n, 0)),
    )


def _call(
    kernel: Callable[..., None],
    scores: KernelScores,
    interpret: bool,
    heads: int,
    ranges: np.ndarray,
    first: jax.Array,
    inputs: list[tuple[jax.Array, pl.BlockSpec]],
    outputs: list[tuple[Any, pl.BlockSpec]],
) -> list[jax.Array]:
    """Runs a program for every held block, head and tree."""
    arrays, specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        functools.partial(kernel, scores=scores),
        grid=(len(ranges), heads, len(first)),
        in_specs=[
            pl.BlockSpec(ranges.shape, lambda i, n, b: (0, 0, 0)),
            pl.BlockSpec(first.shape, lambda i, n, b: (0,)),
            *specs,
        ],
        out_specs=list(out_specs),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        compiler_params=triton.CompilerParams(num_warps=scores.blocks.warps, num_stages=scores.blocks.stages),
        interpret=interpret,
        name=f"tree_attention_{kernel.__name__}",
    )(jnp.asarray(ranges), first, *arrays)
