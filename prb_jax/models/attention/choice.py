"""Which attention over packed streams a model gets: by the machine that its program is for, its dtype, and the user."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, PrbWarning, quote
from prb_jax.models import ATTENTIONS
from prb_jax.models.attention.mesh import sequence_parts
from prb_jax.models.attention.streams import stream_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.seams import BUILTIN, get
from prb_jax.trees.packing import StreamOptions
from prb_jax.trees.stream_tables import BlockTable
from prb_jax.trees.streams import StreamBatch

Attention = Callable[..., jax.Array]
"""Takes q, k, v, window, softcap, and sinks where the model has them, as
:func:`prb_jax.models.attention.streams.stream_attention` does."""

Table = Literal["blocks", "steps", "keys"]
"""The kinds of tables of :mod:`prb_jax.trees.stream_tables` and :mod:`prb_jax.trees.kernel_tables`."""


@dataclass(frozen=True)
class StreamAttention:
    """An implementation of attention over packed streams: its name, and how streams are laid out for it.

    The XLA program is here; kernels are found by the platform that has them, as `attention` of `prb_jax.seams`.
    The tables of a batch say which implementation computes it: see :func:`attend_streams`.
    """

    name: str  # in logs and reports
    table: Table
    parts: int = 1  # into which a mesh's axis `sequence` splits the queries of a stream
    one_length: bool = True  # no stream is made shorter where it is less full than others: compiling is dear
    refused: str | None = None  # why it is not the kernel that the machine has, where it has one
    refusal: Callable[..., str | None] | None = field(default=None, compare=False, repr=False)
    """Of a kernel: takes the configuration, mesh, dtype and trained, and returns why it does not compute this model."""

    def shaped(self, options: StreamOptions) -> StreamOptions:
        """Return the options as the implementation needs them."""
        options = replace(options, parts=self.parts)
        if self.table != "blocks":
            return get("kernel tables", "options").value(options, self.table)
        shaped = options.of_blocks(options.block)
        return shaped if self.one_length else replace(shaped, program_cost=options.program_cost)


def choose_attention(
    mesh: Mesh | None,
    dtype: jnp.dtype,
    wanted: str = "auto",
    *,
    config: DecoderConfig,
    trained: bool = False,
) -> StreamAttention:
    """Return the implementation for programs on ``mesh``, to score and to train alike.

    In bfloat16 "auto" is our Pallas kernel on TPUs, and cuDNN on GPUs if it takes the model; otherwise, and with
    "xla", it is an XLA program. A kernel that this machine uses for the first time is compared with the XLA program
    before. Where a kernel is refused, a warning says why, once.

    Args:
        mesh: of the program, whose devices need not be present; None for one of this process's own devices.
        dtype: of activations.
        wanted: one of :data:`ATTENTIONS`.
        config: the model, which cuDNN may refuse.
        trained: gradients are taken.

    Raises:
        CheckpointError: no such name.
    """
    if wanted not in ATTENTIONS:
        raise CheckpointError(f"attention: expected {' or '.join(ATTENTIONS)}, found {quote(wanted)}")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    parts, refused = sequence_parts(mesh), None
    if dtype == jnp.bfloat16 and wanted == "auto" and platform in BUILTIN["attention"]:
        kernel = get("attention", platform).value
        refused = f"the {kernel.name} has no attention sinks" if config.sinks else None
        refused = refused or kernel.refusal(config, mesh=mesh, dtype=dtype, trained=trained)
        if refused is None:
            return replace(kernel, parts=parts)
    on_cpu = platform == "cpu"
    name = "block-wise XLA over packed streams" + ("" if on_cpu else ", many blocks at a time")
    if refused is not None:
        _warn_once(f"attention: {refused}: it is computed by {name}, which is slower")
    return StreamAttention(name, "blocks", parts, one_length=not on_cpu, refused=refused)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, PrbWarning, stacklevel=3)


def attend_streams(
    q: jax.Array, k: jax.Array, v: jax.Array, *, batch: StreamBatch, mesh: Mesh | None = None, **options: Any
) -> jax.Array:
    """As :func:`prb_jax.models.attention.streams.stream_attention`, by the implementation for which the streams were
    laid out."""
    table = type(batch.blocks)
    if table is not BlockTable and options.get("sinks") is not None:
        raise NotImplementedError("attention sinks: only the XLA program over blocks has them")
    # Only here: what kernels import takes a while, and is for machines that have them.
    attend = stream_attention if table is BlockTable else get("attention", table.__name__).value
    return attend(q, k, v, batch=batch, mesh=mesh, **options)
