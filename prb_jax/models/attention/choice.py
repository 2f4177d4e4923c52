"""Which implementation of attention a program gets: by the machine it is for, its dtype, and the user."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, MeshError, PrbWarning, quote
from prb_jax.models import ATTENTIONS
from prb_jax.models.attention.blockwise import blockwise_attention
from prb_jax.models.attention.streams import stream_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.trees.stream_tables import KeyTable, StepTable
from prb_jax.trees.streams import StreamBatch

Attention = Callable[..., jax.Array]
"""Takes the arguments of :func:`prb_jax.models.attention.blockwise.blockwise_attention`."""

# The names of implementations in logs and reports.
STREAM_ATTENTION = "block-wise XLA over packed streams"
KERNEL_STREAM_ATTENTION = "kernel (Pallas) over packed streams"
CUDNN_STREAM_ATTENTION = "cuDNN over packed streams"
CUDNN = "cuDNN"


@dataclass(frozen=True)
class AttentionChoice:
    """An implementation of attention over padded trees."""

    name: str  # in logs and reports
    attend: Attention
    refused: str | None = None  # the reason why it is not cuDNN's, where it would have been


def choose_attention(
    mesh: Mesh | None,
    dtype: jnp.dtype,
    wanted: str = "auto",
    *,
    config: DecoderConfig | None = None,
    trained: bool = False,
) -> AttentionChoice:
    """The implementation for padded trees in programs on ``mesh``, whose devices need not be present.

    By itself ("auto") it is, in bfloat16, the splash kernel on TPUs and cuDNN on GPUs, and a block-wise program
    everywhere else: in float32 the splash kernel would round the factors of its products to bfloat16, and cuDNN
    computes in two bytes alone.

    Args:
        mesh: of the program; None for one of this process's own devices.
        dtype: of activations.
        wanted: one of :data:`ATTENTIONS`: "blockwise" is the block-wise program on any machine, "kernel" the kernel
            for padded trees, or an error. "streams" scores over packed streams on TPUs too, by the kernel that trains,
            and is an error where it cannot; on GPUs "auto" does so, by cuDNN. This function checks that it can be, and
            gives the implementation for padded trees beside it.
        config: the model, which cuDNN may refuse; None before it is known: then nothing is chosen that may refuse.
        trained: gradients are taken.

    Raises:
        CheckpointError: no such name, or a machine or dtype without such a kernel.
        MeshError: the mesh splits what the kernel cannot.
    """
    if wanted not in ATTENTIONS:
        raise CheckpointError(f"attention: expected {', '.join(ATTENTIONS)}, found {quote(wanted)}")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if wanted == "streams":
        _check_streams(platform, dtype, mesh, trained=trained)
    refused = None
    if dtype == jnp.bfloat16 and wanted != "blockwise":
        if platform == "tpu":
            # Only here: the kernel's package takes a while to import, and knows TPUs alone.
            from prb_jax.models.attention.splash import splash_attention

            return AttentionChoice("splash kernel (Pallas)", functools.partial(splash_attention, mesh=mesh))
        if platform == "gpu" and config is not None:
            from prb_jax.models.attention.cudnn import cudnn_attention, cudnn_refusal

            streams = wanted != "kernel"
            refused = cudnn_refusal(config, mesh=mesh, dtype=dtype, streams=streams, trained=trained)
            if refused is None:
                return AttentionChoice(CUDNN, functools.partial(cudnn_attention, mesh=mesh))
    if wanted in ("kernel", "streams"):
        reason = (
            f"cuDNN does not take this model ({refused})"
            if refused
            else "there are kernels for TPUs and GPUs in bfloat16, found "
            f"{platform} in {jnp.dtype(dtype).name}"
        )
        raise CheckpointError(f"attention: {reason}: use 'blockwise' or 'auto'")
    in_turn = platform == "cpu"
    order = "head by head" if in_turn else "all heads at once"
    attend = functools.partial(blockwise_attention, sequential=in_turn)
    return AttentionChoice(f"block-wise XLA, {order}", attend, refused)


def wanted_attention(
    mesh: Mesh | None, dtype: jnp.dtype, wanted: str, *, config: DecoderConfig, trained: bool = False
) -> Attention | None:
    """What :func:`prb_jax.readouts.score_tree.score_tree` is given: None where it is to choose by itself.

    Arguments and errors as of :func:`choose_attention`. Where cuDNN refuses a model, a warning says why.
    """
    choice = choose_attention(mesh, dtype, wanted, config=config, trained=trained)
    if choice.refused is not None:
        warnings.warn(
            f"attention: cuDNN does not take this model ({choice.refused}): it is computed by {choice.name}, "
            "which is slower",
            PrbWarning,
            stacklevel=3,
        )
    return None if wanted in ("auto", "streams") and choice.name != CUDNN else choice.attend


def stream_attention_name(
    mesh: Mesh, dtype: jnp.dtype, wanted: str = "auto", *, config: DecoderConfig, trained: bool = False
) -> str | None:
    """Return the attention with which a decoder runs over packed streams; None where trees are padded to buckets.

    It is :data:`STREAM_ATTENTION` on CPUs, and :data:`CUDNN_STREAM_ATTENTION` on GPUs in bfloat16 where cuDNN takes the
    model. On TPUs it is :data:`KERNEL_STREAM_ATTENTION`: to score, where streams are wanted; to train, in bfloat16
    where the mesh does not split the tokens of a tree. What is trained is padded wherever another attention than "auto"
    is asked for.

    Args:
        mesh, dtype, wanted, config, trained: as of :func:`choose_attention`, which has checked them.
    """
    platform = mesh.devices.flat[0].platform
    if trained and wanted != "auto":
        return None
    if platform == "gpu":
        if wanted not in ("auto", "streams") or dtype != jnp.bfloat16:
            return None
        from prb_jax.models.attention.cudnn import cudnn_refusal

        refused = cudnn_refusal(config, mesh=mesh, dtype=dtype, streams=True, trained=trained)
        return CUDNN_STREAM_ATTENTION if refused is None else None
    if platform == "tpu":
        whole = dtype == jnp.bfloat16 and mesh.shape["sequence"] == 1
        return KERNEL_STREAM_ATTENTION if (whole if trained else wanted == "streams") else None
    return STREAM_ATTENTION


trained_stream_attention = functools.partial(stream_attention_name, trained=True)


def attention_over(batch: StreamBatch, mesh: Mesh | None) -> Attention:
    """Return the attention of (q, k, v, window, softcap) for which packed streams were laid out."""
    attend: Attention = stream_attention
    if isinstance(batch.blocks, StepTable):
        from prb_jax.models.attention.stream_kernel import kernel_attention as attend
    elif isinstance(batch.blocks, KeyTable):
        from prb_jax.models.attention.cudnn import cudnn_stream_attention as attend
    return functools.partial(attend, batch=batch, mesh=mesh)


def _check_streams(platform: str, dtype: jnp.dtype, mesh: Mesh | None, *, trained: bool) -> None:
    """Refuse to score over packed streams where that cannot be; errors as of :func:`choose_attention`."""
    if platform not in ("tpu", "gpu") or dtype != jnp.bfloat16:
        raise CheckpointError(
            "attention: 'streams' is for TPUs and GPUs in bfloat16, found "
            f"{platform} in {jnp.dtype(dtype).name}: use 'auto'"
        )
    if trained:
        raise CheckpointError(
            "attention: 'streams' says how a model is scored; what is trained takes 'auto', which is streams already"
        )
    if mesh is not None and mesh.shape["sequence"] > 1:
        raise MeshError(
            f"attention: 'streams' takes whole streams, found sequence={mesh.shape['sequence']}: use 'auto'"
        )
