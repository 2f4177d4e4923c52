"""Memory of a training step: what its arrays need on a device, and whether a backward pass recomputes products.

Estimates are analytic, from shapes alone. They were compared with programs that libtpu compiled (docs/plan.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models import Remat
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import ATTENTION, RECURRENT
from prb_jax.models.decoder_layer import splits_weights
from prb_jax.platform.sharding import mesh_shape
from prb_jax.scoring.batching import machine_memory
from prb_jax.trees.tree import BLOCK, CHUNK

ACTIVATIONS = 6e9  # bytes of a stream's activations if neither `batch.tokens` nor the device's memory decides

BUSY_TOKENS = 8_192
"""Tokens of a stream that keep an accelerator busy. If fewer fit with `dots`, recomputing products costs less."""

_USABLE = 0.9  # share of a device's memory that a plan uses; the rest is for fragments, tables and the logs
_COPIES = 5  # float32 arrays per trained weight: parameter, two moments, gradient, and sum of gradients
_WORKING = 1.1  # activations of the layer that a backward pass is in, relative to all that derivatives need


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of a device in a training step, and the choice of rematerialisation that follows from it."""

    config: DecoderConfig  # architecture
    asked: Remat  # setting `remat`
    dtype: DTypeLike = "float32"  # dtype of activations
    room: float | None = None  # bytes of a device for activations; None if unknown
    host: bool = False  # the device is a CPU, so the room does not decide how long streams are
    shards: int = 1  # parts of a batch's tokens, each on another device
    trunks: int = 1  # models whose activations exist at the same time

    def policy(self, tokens: int) -> Remat:
        """Return the policy of a program over a batch with this many tokens on all devices.

        ``auto`` is ``dots`` if its activations fit, else ``full``. ``none`` would save no product: it only writes more
        bytes.
        """
        if self.asked != "auto":
            return self.asked
        if self.room is None or self.needed("dots") * tokens / self.shards <= self.room:
            return "dots"
        return "full"

    def tokens(self, usual: int) -> int:
        """Return the number of tokens of a stream, at most ``usual``, without a setting `batch.tokens`."""
        if self.asked == "auto" and self.room is not None and not self.host:
            for policy in ("dots", "full"):
                fitting = int(self.room / self.needed(policy)) // BLOCK * BLOCK
                if fitting >= min(BUSY_TOKENS, usual) or policy == "full":
                    return max(min(fitting, usual), BLOCK)
        policy = "dots" if self.asked == "auto" else self.asked
        return min(max(int(ACTIVATIONS / self.kept(policy)), usual // 2), usual)

    def kept(self, policy: Remat) -> float:
        """Return the approximate bytes per token that a forward pass keeps for its backward pass."""
        # Norms, rotations and activation functions, of which only `none` keeps results, are float32.
        size = 4 if policy == "none" else jnp.dtype(self.dtype).itemsize
        return self.trunks * size * sum(self._numbers(policy, *kind) for kind in self.config.kinds)

    def needed(self, policy: Remat) -> float:
        """Return :meth:`kept`, plus the float32 activations of the layer that the backward pass is in."""
        of_layer = max(self._numbers("none", *kind) for kind in self.config.kinds)
        return self.kept(policy) + _WORKING * 4 * of_layer

    def _numbers(self, policy: Remat, mixer: str, part: str) -> float:
        """Return the approximate numbers per token that one layer keeps."""
        config = self.config
        width, mlp = config.hidden_size, config.active_mlps[part]
        of_layer = {"none": 8 * width + 6 * mlp, "dots": 2 * width + 2 * mlp, "full": width}[policy]
        if mixer == ATTENTION:
            queries, keys = (
                heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
            )
            of_mixer = {"none": 6 * queries + 5 * keys, "dots": 2 * queries + 2 * keys, "full": 0}
            return of_layer + of_mixer[policy]
        sizes = config.recurrence
        assert sizes is not None
        assert mixer == RECURRENT
        channels = sum(sizes.widths.values()) + sizes.widths["v"]
        # Each chunk keeps a few CHUNK x CHUNK matrices per head, and the state before the chunk.
        of_chunk = sizes.value_heads * (6 * CHUNK + sizes.key_dim * sizes.value_dim // CHUNK)
        return of_layer + {"none": 8 * channels + of_chunk, "dots": 2 * channels, "full": 0}[policy]


def step_memory(
    config: DecoderConfig,
    settings: Any,
    *,
    mesh: Mesh,
    trained: Any,
    frozen: Mapping[str, Any],
    trained_shardings: Any,
    frozen_shardings: Any,
    trunks: int = 1,
) -> StepMemory:
    """Return the memory of a device in the steps of a run.

    Args:
      config: Architecture.
      settings: Settings with `remat` and `dtype`.
      mesh: Devices.
      trained, frozen: Shapes of the trained and the frozen weights.
      trained_shardings, frozen_shardings: Their shardings.
      trunks: Models whose activations exist at the same time.
    """
    dtype, shape = jnp.dtype(settings.dtype), mesh_shape(mesh)
    device, room = mesh.devices.flat[0], None
    limit = memory_limit(device)
    host = limit is None and device.platform == "cpu"
    if host:
        limit = machine_memory() / mesh.size
    if limit is not None:
        held = _COPIES * 4 * numbers_per_device(trained, trained_shardings)
        held += dtype.itemsize * numbers_per_device(frozen, frozen_shardings)
        if splits_weights(mesh):  # one layer is gathered while another one computes
            layers = [tree.get("layers", {}) for tree in (trained, frozen)]
            sizes = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layers))
            held += 2 * dtype.itemsize * sizes / config.num_hidden_layers
        room = max(_USABLE * limit - held, 0.0)
    shards = shape.batch_shards * shape.sequence
    return StepMemory(
        config=config, asked=settings.remat, dtype=dtype, room=room, host=host, shards=shards, trunks=trunks
    )


def numbers_per_device(tree: Any, shardings: Any) -> int:
    """Return the numbers of a tree of shapes that one device holds."""
    parts = jax.tree.map(lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)), tree, shardings)
    return sum(jax.tree.leaves(parts))


def memory_limit(device: Any) -> float | None:
    """Return the bytes that this process may use on an accelerator; None for a CPU, and if the device does not
    report them, e.g. a TPU that is only compiled for."""
    if device.platform == "cpu":
        return None
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (jax.errors.JaxRuntimeError, NotImplementedError, AttributeError):
        return None
