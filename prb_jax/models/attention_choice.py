"""Which implementation of attention a program gets: by the machine it is for, and its dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.attention import blockwise_attention

Attention = Callable[..., jax.Array]
"""Takes the arguments of :func:`prb_jax.models.attention.reference_attention`."""


@dataclass(frozen=True)
class AttentionChoice:
    """An implementation and what it is called in logs and reports."""

    name: str
    attend: Attention


def choose_attention(mesh: Mesh | None, dtype: jnp.dtype) -> AttentionChoice:
    """The implementation for programs on ``mesh``, whose devices need not be present.

    TPUs get the splash kernel for bfloat16. In float32 they get the same block-wise program as every other
    machine: the kernel would round the factors of its products to bfloat16.

    Args:
        mesh: of the program; None for one of this process's own devices.
        dtype: of activations.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform == "tpu" and dtype == jnp.bfloat16:
        # Only here: the kernel's package takes a while to import, and knows TPUs alone.
        from prb_jax.models.attention_splash import splash_attention

        return AttentionChoice("splash kernel (Pallas)", functools.partial(splash_attention, mesh=mesh))
    in_turn = platform == "cpu"
    order = "head by head" if in_turn else "all heads at once"
    return AttentionChoice(
        f"block-wise XLA, {order}", functools.partial(blockwise_attention, sequential=in_turn)
    )
