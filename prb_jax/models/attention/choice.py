"""Which implementation of attention a program gets: by the machine it is for, its dtype, and the user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, quote
from prb_jax.models import ATTENTIONS
from prb_jax.models.attention.blockwise import blockwise_attention

Attention = Callable[..., jax.Array]
"""Takes the arguments of :func:`prb_jax.models.attention.blockwise.blockwise_attention`."""

STREAM_ATTENTION = "block-wise XLA over packed streams"
"""What :mod:`prb_jax.models.attention.streams` is called in logs and reports."""


@dataclass(frozen=True)
class AttentionChoice:
    """An implementation and what it is called in logs and reports."""

    name: str
    attend: Attention


def choose_attention(mesh: Mesh | None, dtype: jnp.dtype, wanted: str = "auto") -> AttentionChoice:
    """The implementation for programs on ``mesh``, whose devices need not be present.

    By itself ("auto") it is the splash kernel on TPUs in bfloat16, and a block-wise program everywhere else: in
    float32 the splash kernel would round the factors of its products to bfloat16, and the kernel for GPUs has
    been checked, but not timed.

    Args:
        mesh: of the program; None for one of this process's own devices.
        dtype: of activations.
        wanted: one of :data:`ATTENTIONS`: "blockwise" is the block-wise program on any machine, "kernel" the
            machine's own kernel.

    Raises:
        CheckpointError: no such name, or a machine or dtype without a kernel.
        MeshError: the mesh splits what the kernel cannot.
    """
    if wanted not in ATTENTIONS:
        raise CheckpointError(f"attention: expected {', '.join(ATTENTIONS)}, found {quote(wanted)}")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform == "tpu" and dtype == jnp.bfloat16 and wanted != "blockwise":
        # Only here: the kernel's package takes a while to import, and knows TPUs alone.
        from prb_jax.models.attention.splash import splash_attention

        return AttentionChoice("splash kernel (Pallas)", functools.partial(splash_attention, mesh=mesh))
    if wanted == "kernel":
        if platform != "gpu":
            raise CheckpointError(
                "attention: there are kernels for GPUs, and for TPUs in bfloat16, found "
                f"{platform} in {jnp.dtype(dtype).name}: use 'blockwise' or 'auto'"
            )
        from prb_jax.models.attention.triton import check_kernel_mesh, triton_attention

        check_kernel_mesh(mesh)
        return AttentionChoice("tree kernel (Pallas, Triton)", functools.partial(triton_attention, mesh=mesh))
    in_turn = platform == "cpu"
    order = "head by head" if in_turn else "all heads at once"
    return AttentionChoice(
        f"block-wise XLA, {order}", functools.partial(blockwise_attention, sequential=in_turn)
    )


def wanted_attention(mesh: Mesh | None, dtype: jnp.dtype, wanted: str) -> Attention | None:
    """What :func:`prb_jax.readouts.score_tree.score_tree` is given: None where it is to choose by itself.

    Arguments and errors as of :func:`choose_attention`.
    """
    return None if wanted == "auto" else choose_attention(mesh, dtype, wanted).attend
