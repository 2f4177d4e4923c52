"""Verification of kernels: the first use of a kernel on a machine compares it with the XLA program.

Both compute a small stream of packed trees, with and without a window, a softcap and the model's attention sinks,
forward and backward. The result is cached beside the compilation cache, by device, versions and head sizes.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import RunError
from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.attention.streams import Attention, stream_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.platform.processes.sharing import gather_int32
from prb_jax.records.reading import read_json
from prb_jax.records.writing import write_json
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import build_tree
from prb_jax.version import versions

FILE = "kernels.json"  # in the folder of compiled programs

_TOKENS, _LONGEST, _WINDOW, _SOFTCAP = 4096, 1150, 300, 20.0
_OTHERS = (780, 310, 360)  # prefixes of more trees, with which the TPU kernel uses all of its areas
_COMPUTING = ("jax", "jaxlib", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_OF_XLA = 2.0  # tolerance, as a multiple of the XLA program's difference between bfloat16 and float32


def kernel_fault(
    kernel: StreamAttention,
    attend: Attention,
    config: DecoderConfig,
    *,
    mesh: Mesh | None,
    takes_softcap: bool = True,
) -> str | None:
    """Return why a kernel must not be used on the devices of this process, or None if its numbers are correct.

    Nothing is computed for a program that is compiled for devices outside this process.

    Args:
        kernel: Kernel with its stream layout.
        attend: Function that computes the kernel on one device.
        config: Architecture of the model, for the head sizes.
        mesh: Devices; None for the devices of this process.
        takes_softcap: If True, the kernel supports softcaps.
    """
    devices = jax.local_devices() if mesh is None else [d for d in mesh.devices.flat if is_here(d)]
    if not devices:
        return None
    options = kernel.shaped(StreamOptions(_TOKENS, window=_WINDOW))
    group = config.num_attention_heads // config.num_key_value_heads
    softcap = _SOFTCAP if takes_softcap else None
    return _agreed(kernel.name, attend, options, devices[0], group, config.head_dim, softcap, config.sinks)


def is_here(device: Any) -> bool:
    """Return True if a device belongs to this process and is not merely a description."""
    client = getattr(device, "client", None)
    return client is not None and device in client.local_devices()


@functools.cache
def _agreed(name: str, attend: Attention, options: StreamOptions, device: Any, *sizes: Any) -> str | None:
    """Return the result of :func:`kernel_fault`, equal in all processes; a collective."""
    group, head_dim, softcap, sinks = sizes
    numbers = [
        f"{package} {number}" for package, number in versions(_COMPUTING).items() if number is not None
    ]
    key = ", ".join([name, device.device_kind, *numbers, f"{group} heads of {head_dim}"])
    key += " with sinks" if sinks else ""
    differences = _known(key)
    if differences is None:
        with jax.default_device(device):
            differences = compare(
                attend, options, group=group, head_dim=head_dim, softcap=softcap, sinks=sinks
            )
        _remember(key, differences)
    found, allowed = differences
    fault = None
    if not found <= allowed:  # also true for NaN
        fault = (
            f"the {name} gives wrong numbers on this machine: outputs or gradients differ by {found:.1e} of "
            f"their norm from those in float32, expected at most {allowed:.1e}"
        )
    faults = gather_int32(np.asarray([fault is not None], np.int32))
    return fault or (
        f"the {name} gives wrong numbers on another process" if np.concatenate(faults).any() else None
    )


def compare(
    attend: Attention,
    options: StreamOptions,
    *,
    group: int,
    head_dim: int,
    softcap: float | None,
    sinks: bool = False,
) -> tuple[float, float]:
    """Return the difference between a kernel in bfloat16 and the XLA program in float32, and its limit.

    Both are norms of differences divided by norms, for the array with the largest difference relative to its limit:
    the output, or a gradient.
    """
    trees, shape = _trees(), StreamShape(options.tokens, 32)

    def computed(attend: Attention, dtype: Any, options: StreamOptions) -> list[np.ndarray]:
        (packed,) = pack_streams(trees, shape, options)
        batch = make_stream_batch(trees, packed, options)
        results = _both_passes(attend, dtype, batch, group, head_dim, softcap, sinks=sinks)
        return [np.asarray(x, np.float32) for x in results]

    blocks = StreamOptions(options.tokens, window=options.window)
    exact = computed(stream_attention, jnp.float32, blocks)
    by_xla = computed(stream_attention, jnp.bfloat16, blocks)
    ours = computed(attend, jnp.bfloat16, options)
    pairs = [
        (_off(one, truth), _OF_XLA * _off(other, truth))
        for one, other, truth in zip(ours, by_xla, exact, strict=True)
    ]
    return max(pairs, key=lambda pair: pair[0] / pair[1] if math.isfinite(pair[0]) else math.inf)


def _both_passes(
    attend: Attention,
    dtype: Any,
    batch: StreamBatch,
    group: int,
    head_dim: int,
    softcap: float | None,
    *,
    sinks: bool,
) -> Any:
    """Return the outputs with and without a window and a softcap, and the gradients by q, k and v."""
    rng, tokens = np.random.default_rng(0), batch.tokens.shape[1]
    heads = (group, 1, 1, group)
    q, k, v, towards = (jnp.asarray(rng.normal(size=(1, tokens, n, head_dim)), dtype) for n in heads)
    q = q / jnp.asarray(math.sqrt(head_dim) / 2, dtype)
    logits = {"sinks": jnp.linspace(-1.0, 2.0, group)} if sinks else {}

    @jax.jit
    def run(batch: StreamBatch, towards: jax.Array, *qkv: jax.Array) -> Any:
        def outputs(*qkv: jax.Array) -> jax.Array:
            whole = attend(*qkv, batch=batch)
            near = attend(*qkv, batch=batch, window=_WINDOW, softcap=softcap, **logits)
            real = (jnp.asarray(batch.until) > jnp.arange(1, tokens + 1)) | (jnp.asarray(batch.positions) > 0)
            return jnp.where(real[..., None, None], jnp.stack([whole, near]), 0)

        out, pull = jax.vjp(outputs, *qkv)
        return out, *pull(jnp.stack([towards, towards[::-1]]))

    return run(batch, towards, q, k, v)


def _trees() -> list[Any]:
    """Return less than one stream of trees: a long conversation with three ends, users with two questions, short
    conversations, and pairs."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(3, 1000, count)

    long, profile = ids(_LONGEST), ids(_LONGEST // 4)
    trees = [build_tree([np.concatenate([long, ids(60)]) for _ in range(3)])]
    for _ in range(2):
        question = np.concatenate([profile, ids(30)])
        trees.append(build_tree([np.concatenate([question, ids(length)]) for length in (20, 45)]))
    trees += [build_tree([ids(40), ids(9)]), build_tree([ids(1)])]
    for prefix in map(ids, _OTHERS):
        trees.append(build_tree([np.concatenate([prefix, ids(length)]) for length in (35, 70)]))
    return trees


def _off(ours: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm((ours - exact).ravel()) / np.linalg.norm(exact.ravel()))


def _file() -> Path | None:
    """Return the file of cached differences; None without a local folder of compiled programs."""
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(folder) / FILE if folder and "://" not in folder else None


def _known(key: str) -> tuple[float, float] | None:
    """Return the cached differences."""
    if (path := _file()) is None:
        return None
    try:
        found, allowed = read_json(path, error=RunError, optional=True)[key]
        return float(found), float(allowed)
    except (RunError, KeyError, TypeError, ValueError):  # missing or damaged: computed again
        return None


def _remember(key: str, differences: tuple[float, float]) -> None:
    """Cache differences for later processes; if this fails, they compute them again."""
    if (path := _file()) is None:
        return
    try:
        kept = read_json(path, error=RunError, optional=True)
        # Stored as strings because JSON has no NaN.
        write_json(
            path, {**(kept if isinstance(kept, dict) else {}), key: [repr(one) for one in differences]}
        )
    except RunError:
        return
