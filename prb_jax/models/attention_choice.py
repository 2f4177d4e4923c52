"""Which attention runs where."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp

from prb_jax.models.attention import blockwise_attention
from prb_jax.models.attention_cudnn import MAX_HEAD_DIM, cudnn_attention
from prb_jax.models.config import DecoderConfig

log = logging.getLogger(__name__)


def choose_scoring_attention(
    config: DecoderConfig, *, platform: str, dtype: jnp.dtype
) -> Callable[..., jax.Array]:
    """The fastest forward attention that gives this model's numbers on these devices.

    cuDNN on NVIDIA GPUs in bfloat16, for models without soft-caps; layers whose window is shorter than
    a conversation, and everything else, run blockwise.
    """
    fits_cudnn = (
        platform in ("gpu", "cuda")
        and dtype == jnp.bfloat16
        and config.attn_logit_softcapping is None
        and config.head_dim % 8 == 0
        and config.head_dim <= MAX_HEAD_DIM
    )
    log.info("attention: %s", "cuDNN" if fits_cudnn else "blockwise")
    return _cudnn_or_blockwise if fits_cudnn else blockwise_attention


def _cudnn_or_blockwise(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None, **options: object
) -> jax.Array:
    attend = cudnn_attention if window is None else blockwise_attention
    return attend(q, k, v, window=window, **options)  # pyright: ignore[reportArgumentType]
