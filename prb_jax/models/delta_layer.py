"""Recurrent mixer of a layer: parameters and computation of the gated delta net of Qwen 3.5 and Qwen3-Next.

Queries, keys and values pass through a causal convolution over the last K tokens of their conversation and SiLU, then
through the gated delta rule (:mod:`prb_jax.models.delta_rule`). Both are always computed in float32.

Dimensions as in :mod:`prb_jax.models.delta_rule`; S streams of N tokens, F prompts that end in each stream.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from prb_jax.errors import short_repr
from prb_jax.models.attention.streams import take_places
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.recurrence import Recurrence
from prb_jax.models.decoder_layer import DecoderLayer, LayerContext
from prb_jax.models.delta_rule import delta_over_chunks, unit
from prb_jax.models.layers import rms_norm
from prb_jax.models.parameter import Axes, drawn, parameter, places_in_tensor
from prb_jax.platform.sharding import RULES
from prb_jax.trees.chunk_tables import ChunkTable
from prb_jax.trees.streams import StreamBatch


def declare(
    layer: DecoderLayer, config: DecoderConfig, *, rngs: nnx.Rngs, part: str, dtype: Any, **uses: Any
) -> None:
    """Declare the parameters of the mixer as attributes of a layer with the prefix ``delta_``."""
    sizes = config.recurrence
    assert sizes is not None
    width, of_taps = config.hidden_size, sizes.widths
    values, into = of_taps["v"], ("model", "heads")
    widths = {**of_taps, "z": values, "b": sizes.value_heads, "a": sizes.value_heads}
    put = functools.partial(setattr, layer)

    def matrix(name: str, hf: str, *shape: int, axes: Axes = into, **more: Any) -> None:
        declared = {**uses, "part": part, "dtype": dtype, **more}
        put(f"delta_{name}", drawn(rngs, *shape, axes=axes, hf=f"linear_attn.{hf}.weight", **declared))

    def vector(name: str, hf: str, value: jax.Array, axis: str | None) -> None:
        put(f"delta_{name}", parameter(value.astype(dtype), axes=(axis,), hf=f"linear_attn.{hf}", part=part))

    groups = sizes.key_heads if sizes.grouped else 1
    for names in ("qkvz", "ba") if sizes.grouped else ("qkv", "z", "b", "a"):
        places = places_in_tensor({name: widths[name] for name in names}, groups=groups)
        for name in names:
            # b and a are not quantised: they have few channels and determine how long a state lasts.
            kept = {"quantisable": False} if name in "ba" else {}
            stored = places[name] if len(names) > 1 else {}
            matrix(name, f"in_proj_{names}", width, widths[name], **kept, **stored)
    for name, of_file in places_in_tensor(of_taps).items():
        plain = {
            "adaptable": False,
            "quantisable": False,
            "scale": sizes.taps**-0.5,
            "axes": (None, None, "heads"),
        }
        matrix(f"{name}_taps", "conv1d", sizes.taps, 1, widths[name], **plain, **of_file)
    vector("step_bias", "dt_bias", jnp.ones(sizes.value_heads), "heads")
    decays = jax.random.uniform(rngs.params(), (sizes.value_heads,), minval=1.0, maxval=16.0)
    vector("log_decay", "A_log", jnp.log(decays), "heads")
    vector("norm", "norm.weight", jnp.ones(sizes.value_dim), None)
    matrix("o", "out_proj", values, width, axes=into[::-1])


def mix(layer: DecoderLayer, y: jax.Array, context: LayerContext) -> tuple[jax.Array, Any]:
    """Mix normed tokens y [B, T, D].

    Returns:
        [B, T, D], or [B, K, D] at the places of the context; and the states that `recur` of the context keeps.
    """
    sizes, places = layer.config.recurrence, context.places
    assert sizes is not None
    assert context.recur is not None
    project = functools.partial(layer.project, scale=context.lora_scale)

    def held(name: str) -> jax.Array:
        return getattr(layer, f"delta_{name}")[...]

    q, k, v, a, b = (project(f"delta_{name}", y) for name in "qkvab")
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    step = jax.nn.softplus(a.astype(jnp.float32) + held("step_bias").astype(jnp.float32))
    g = -jnp.exp(held("log_decay").astype(jnp.float32)) * step
    taps = tuple(held(f"{name}_taps")[:, 0].astype(jnp.float32) for name in "qkv")
    mixed, kept = context.recur((q, k, v), g, beta, taps, sizes)
    if places is not None:
        mixed, y = take_places(mixed, places), take_places(y, places)
    mixed = mixed.astype(y.dtype).reshape(*mixed.shape[:2], -1, sizes.value_dim)
    # The weight of this norm is not centred, unlike the weights of other norms.
    normed = rms_norm(
        mixed, held("norm"), eps=layer.config.rms_norm_eps, plus_one=False, scale_after_cast=True
    ).reshape(*y.shape[:2], -1)
    z = project("delta_z", y).astype(jnp.float32)
    return project("delta_o", (normed.astype(jnp.float32) * jax.nn.silu(z)).astype(y.dtype)), kept


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EndStates:
    """States of one layer at the ends of conversations in streams, for later tokens."""

    states: jax.Array  # float32 [S, F, H, dk, dv], after the last token
    windows: tuple[
        jax.Array, ...
    ]  # for q, k and v [S, F, channels, K - 1], inputs of the convolution, most recent last

    __repr__ = short_repr


def over_stream(
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    g: jax.Array,
    beta: jax.Array,
    taps: tuple[jax.Array, ...],
    sizes: Recurrence,
    *,
    batch: StreamBatch,
    mesh: Mesh | None,
    keep: bool,
) -> tuple[jax.Array, EndStates | None]:
    """Run the convolution and the recurrence over packed streams; each device computes its streams and heads.

    Args:
        inputs: Inputs q, k and v [S, N, channels].
        g, beta: Log-decays and strengths, float32 [S, N, H].
        taps: Taps for q, k and v, float32 [K, channels], most recent token last.
        sizes: Sizes of the layer.
        batch: Streams with their chunks.
        mesh: Mesh that splits streams and heads; a `sequence` axis does not split streams.
        keep: If True, also return the states at the `ends` of the batch.

    Returns:
        Outputs float32 [S, N, H * dv].
    """
    if batch.chunks is None:
        raise ValueError("these streams have no chunks for recurrent layers")

    def stream(*arrays: Any) -> Any:
        return _one_stream(*arrays, sizes=sizes, keep=keep)

    def run(arrays: Any, taps: Any) -> Any:
        if len(arrays[1]) == 1:
            out = stream(*jax.tree.map(lambda x: x[0], arrays), taps)
            return jax.tree.map(lambda x: x[None], out)
        return lax.map(lambda of_stream: stream(*of_stream, taps), arrays)

    ends = jnp.asarray(batch.ends) if keep else jnp.zeros((len(g), 0), jnp.int32)
    arrays = (inputs, g, beta, jax.tree.map(jnp.asarray, batch.chunks), ends)
    if mesh is None or mesh.size == 1:
        return run(arrays, taps)
    rows, heads = RULES["batch"], RULES["heads"]
    split, of_stream = PartitionSpec(rows, None, heads), PartitionSpec(rows)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=((split, split, split, of_stream, of_stream), PartitionSpec(None, heads)),
        out_specs=split,
        check_vma=False,  # triangular solvers do not declare the axes over which their results vary
    )(arrays, taps)


def _one_stream(
    inputs: tuple[jax.Array, ...],
    g: jax.Array,
    beta: jax.Array,
    table: ChunkTable,
    ends: jax.Array,
    taps: tuple[jax.Array, ...],
    *,
    sizes: Recurrence,
    keep: bool,
) -> tuple[jax.Array, EndStates | None]:
    """Run one stream; arrays have no stream axis."""
    chunks, size = table.places.shape
    places, slots = jnp.asarray(table.places).reshape(-1), jnp.asarray(table.slots)

    def cut(x: jax.Array) -> jax.Array:
        return _rows(x, places, slots).reshape(chunks, size, -1)

    def convolved(x: jax.Array, taps: jax.Array) -> jax.Array:
        before = jnp.take(x, jnp.asarray(table.history), axis=0, mode="fill", fill_value=0)
        line = jnp.concatenate([before, cut(x)], axis=1).astype(jnp.float32)
        return jax.nn.silu(sum(tap * line[:, n : n + size] for n, tap in enumerate(taps)))

    def by_head(x: jax.Array, channels: int) -> jax.Array:
        return x.reshape(chunks, size, -1, channels).swapaxes(1, 2)

    q, k, v = map(convolved, inputs, taps)
    q = unit(by_head(q, sizes.key_dim)) * sizes.key_dim**-0.5
    out, states = delta_over_chunks(
        q,
        unit(by_head(k, sizes.key_dim)),
        by_head(v, sizes.value_dim),
        cut(g).swapaxes(1, 2),
        cut(beta).swapaxes(1, 2),
        read=jnp.asarray(table.read),
        write=jnp.asarray(table.write),
        slots=table.slot_count,
        keep=keep,
    )
    mixed = _rows(out.swapaxes(1, 2).reshape(chunks * size, -1), slots, places)
    if states is None:
        return mixed, None
    # Every conversation ends at the end of a chunk, so its last inputs are in the chunk or just before it.
    chunk, column = slots[ends] // size, slots[ends] % size

    def window(x: jax.Array) -> jax.Array:
        before = jnp.concatenate(
            [jnp.asarray(table.history)[chunk], jnp.asarray(table.places)[chunk]], axis=1
        )
        # The last K - 1 tokens up to the end at K - 1 + column.
        last = column[:, None] + 1 + jnp.arange(sizes.taps - 1)
        taken = jnp.take(x, jnp.take_along_axis(before, last, axis=1), axis=0, mode="fill", fill_value=0)
        return taken.swapaxes(1, 2)

    return mixed, EndStates(states[chunk], tuple(map(window, inputs)))


@jax.custom_vjp
def _rows(x: jax.Array, places: jax.Array, back: jax.Array) -> jax.Array:
    """Return rows of x [N, I] at places [M], zeros for places beyond the last row.

    Every row has at most one place, in ``back`` [N], so the derivative is also a gather, without sums.
    """
    return jnp.take(x, places, axis=0, mode="fill", fill_value=0)


_rows.defvjp(
    lambda x, places, back: (_rows(x, places, back), (places, back)),
    lambda kept, gradient: (_rows(gradient, kept[1], kept[0]), None, None),
)
