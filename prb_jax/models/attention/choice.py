"""The choice of an implementation of attention over packed streams: the XLA program, or the kernel of a machine."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, PrbWarning, quote
from prb_jax.models import ATTENTIONS
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.platform.sharding import sequence_parts
from prb_jax.seams import BUILTIN, get
from prb_jax.trees.streams import StreamOptions

Table = Literal["blocks", "steps", "keys"]
"""Kinds of tables in :mod:`prb_jax.trees.streams` and :mod:`prb_jax.trees.kernel_tables`."""


@dataclass(frozen=True)
class StreamAttention:
    """An implementation of attention over packed streams: its name and its stream layout.

    Kernels are found by platform, as `attention` in `prb_jax.seams`. The tables of a batch determine the
    implementation: see :func:`prb_jax.models.attention.streams.stream_attention`, which is also the XLA program.
    """

    name: str  # name in logs and reports
    table: Table
    parts: int = 1  # parts of a stream's queries, split by the mesh axis `sequence`
    one_length: bool = (
        True  # if True, no shorter shapes for streams with few tokens, because compiling is expensive
    )
    has_sinks: bool = False  # for a kernel: True if it supports attention sinks
    refused: str | None = None  # reason why the machine's kernel is not used, if it has one
    refusal: Callable[..., str | None] | None = field(default=None, compare=False, repr=False)
    """For a kernel: function (configuration, mesh, dtype, trained) -> reason why it cannot compute the model, or
    None."""

    def shaped(self, options: StreamOptions) -> StreamOptions:
        """Return the options adapted to the implementation."""
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
    """Return the implementation for programs on ``mesh``, for scoring and training.

    In bfloat16, "auto" selects our Pallas kernel on TPUs, and cuDNN on GPUs if it supports the model. In all other
    cases, and for "xla", an XLA program is used. The first use of a kernel on a machine compares it with the XLA
    program. If a kernel is refused, one warning gives the reason.

    Args:
        mesh: Mesh of the program, whose devices need not be present; None for one device of this process.
        dtype: Dtype of activations.
        wanted: One of :data:`ATTENTIONS`.
        config: Architecture of the model, which cuDNN may refuse.
        trained: If True, the program computes gradients.

    Raises:
        CheckpointError: ``wanted`` is unknown.
    """
    if wanted not in ATTENTIONS:
        raise CheckpointError(f"attention: expected {' or '.join(ATTENTIONS)}, found {quote(wanted)}")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    parts, refused = sequence_parts(mesh), None
    if dtype == jnp.bfloat16 and wanted == "auto" and platform in BUILTIN["attention"]:
        kernel = get("attention", platform).value
        refused = (
            f"the {kernel.name} has no attention sinks" if config.sinks and not kernel.has_sinks else None
        )
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
