"""Caches of recurrent layers: the state of each prompt, and the updates of samples.

A prompt is one state, shared by all of its samples. Instead of a separate state, a sample keeps the updates k d^T of
its tokens and their running decay in the columns of a suffix cache:

    S_t = exp(G_t) S_0 + sum over m <= t of exp(G_t - G_m) k_m d_m^T

Tokens may therefore follow any position of a sample, as in attention, and the state of a prompt is read once for all
of its samples.

Dimensions as in :mod:`prb_jax.models.delta_rule`; B trees, S samples, C candidate tokens each, M suffix columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.errors import short_repr
from prb_jax.models.config.recurrence import Recurrence
from prb_jax.models.delta_layer import EndStates
from prb_jax.models.delta_rule import unit
from prb_jax.models.layers import float32_einsum

Arrays = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentPrefix:
    """Prompts of B trees in one layer."""

    states: jax.Array  # float32 [B, H, dk, dv]
    windows: (
        Arrays  # for q, k and v [B, channels, K - 1], the last inputs of the convolution, most recent last
    )

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentSuffix:
    """Updates of S samples per tree in one layer."""

    inputs: Arrays  # for q, k and v [B, S, channels, M], inputs of the convolution
    keys: jax.Array  # float32 [B, S, J, M, dk]
    updates: jax.Array  # float32 [B, S, H, M, dv], d of each token
    decays: jax.Array  # float32 [B, S, H, M], running sums of log-decays from the end of the prompt

    __repr__ = short_repr


def empty_prefix(sizes: Recurrence, *, trees: int, dtype: jnp.dtype) -> RecurrentPrefix:
    """Return the states of empty prompts."""
    windows = tuple(jnp.zeros((trees, width, sizes.taps - 1), dtype) for width in sizes.widths.values())
    shape = (trees, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return RecurrentPrefix(jnp.zeros(shape, jnp.float32), windows)


def empty_suffix(
    sizes: Recurrence, *, trees: int, samples: int, columns: int, dtype: jnp.dtype
) -> RecurrentSuffix:
    """Return the updates of empty samples."""
    rows = (trees, samples)
    return RecurrentSuffix(
        tuple(jnp.zeros((*rows, width, columns), dtype) for width in sizes.widths.values()),
        jnp.zeros((*rows, sizes.key_heads, columns, sizes.key_dim), jnp.float32),
        jnp.zeros((*rows, sizes.value_heads, columns, sizes.value_dim), jnp.float32),
        jnp.zeros((*rows, sizes.value_heads, columns), jnp.float32),
    )


def prefix_at_ends(read: EndStates, ends: jax.Array, lengths: jax.Array) -> RecurrentPrefix:
    """Return the states [S, F, ...] of prompts with these end indices, int32 [S, F], in their streams.

    A prompt of length 0 has a state of zeros.
    """

    def taken(leaf: jax.Array) -> jax.Array:
        of_prompts = jax.vmap(lambda of_stream, places: of_stream[places])(leaf, ends)
        return jnp.where(lengths.reshape(*lengths.shape, *[1] * (leaf.ndim - 2)) > 0, of_prompts, 0)

    return RecurrentPrefix(taken(read.states), tuple(map(taken, read.windows)))


def over_caches(
    inputs: Arrays,
    g: jax.Array,
    beta: jax.Array,
    taps: Arrays,
    sizes: Recurrence,
    *,
    prefix: RecurrentPrefix,
    suffix: RecurrentSuffix,
    places: jax.Array,
) -> tuple[jax.Array, RecurrentSuffix]:
    """Run C candidate tokens per sample, each independent of the others.

    Args:
      inputs: Inputs q, k and v [B, S * C, channels].
      g, beta: Log-decays and strengths, float32 [B, S * C, H].
      taps, sizes: Same as in :func:`prb_jax.models.delta_layer.over_stream`.
      prefix, suffix: Caches of the earlier tokens.
      places: Number of tokens of the sample that each candidate follows, int32 [B, S, C].

    Returns:
      Outputs float32 [B, S * C, H * dv], and the update of each token, with axis 2 = C instead of columns.
    """
    rows = places.shape
    inputs = tuple(x.reshape(*rows, -1) for x in inputs)
    g, beta = (x.reshape(*rows, -1) for x in (g, beta))

    def convolved(x: jax.Array, window: jax.Array, written: jax.Array, taps: jax.Array) -> jax.Array:
        total = taps[-1] * x.astype(jnp.float32)
        for back in range(1, len(taps)):
            place = (places - back)[:, :, None]
            before = jnp.take_along_axis(
                window[:, None], jnp.clip(len(taps) - 1 + place, 0, len(taps) - 2), axis=3
            )
            behind = jnp.take_along_axis(written, jnp.clip(place, 0, written.shape[3] - 1), axis=3)
            seen = jnp.where(place < 0, before, behind).swapaxes(2, 3)  # [B, S, C, channels]
            total = total + taps[-1 - back] * seen.astype(jnp.float32)
        return jax.nn.silu(total)

    q, k, v = map(convolved, inputs, prefix.windows, suffix.inputs, taps)
    q = unit(q.reshape(*rows, -1, sizes.key_dim)) * sizes.key_dim**-0.5
    k = unit(k.reshape(*rows, -1, sizes.key_dim))
    v = v.reshape(*rows, -1, sizes.value_dim)
    shared = sizes.value_heads // sizes.key_heads

    # Running decay before and including each token: [B, S, C, H].
    last = jnp.clip(places - 1, 0, suffix.decays.shape[3] - 1)[:, :, None]
    before = jnp.take_along_axis(suffix.decays, last, axis=3).swapaxes(2, 3)
    total = jnp.where(places[..., None] > 0, before, 0.0) + g
    written = jnp.arange(suffix.decays.shape[3]) < places[..., None, None]
    fading = jnp.where(written, total[..., None] - suffix.decays[:, :, None], -jnp.inf)
    fading = jnp.exp(fading)  # [B, S, C, H, M]

    def seen(x: jax.Array) -> jax.Array:
        """Multiply x [B, S, C, J, dk] by the state decayed to this token: [B, S, C, H, dv]."""
        # With C or S before H in its result, an einsum takes states and updates as the first factor, and CPUs transpose
        # all of them for every token.
        wide = jnp.repeat(x, shared, axis=3)
        of_prompt = jnp.moveaxis(float32_einsum("bschd,bhdv->bhscv", wide, prefix.states), 1, 3)
        weights = jnp.repeat(float32_einsum("bscjd,bsjmd->bscjm", x, suffix.keys), shared, axis=3) * fading
        added = float32_einsum("bschm,bshmv->bshcv", weights, suffix.updates).swapaxes(2, 3)
        return of_prompt * jnp.exp(total)[..., None] + added

    d = beta[..., None] * (v - seen(k))
    own = jnp.repeat(jnp.sum(q * k, axis=-1), shared, axis=3)
    out = seen(q) + own[..., None] * d
    return out.reshape(rows[0], -1, out.shape[3] * sizes.value_dim), RecurrentSuffix(inputs, k, d, total)


def longer_prefix(
    prefix: RecurrentPrefix, suffix: RecurrentSuffix, which: jax.Array, counts: jax.Array
) -> RecurrentPrefix:
    """Return the states of prompts after appending the first ``counts`` int32 [B] tokens of sample ``which`` int32
    [B]."""

    def of_sample(leaf: jax.Array) -> jax.Array:
        return jnp.take_along_axis(leaf, which.reshape(-1, *[1] * (leaf.ndim - 1)), axis=1)[:, 0]

    added = jax.tree.map(of_sample, suffix)
    written = jnp.arange(added.decays.shape[2]) < counts[:, None, None]
    last = jnp.clip(counts - 1, 0, added.decays.shape[2] - 1)[:, None, None]
    total = jnp.where(counts[:, None] > 0, jnp.take_along_axis(added.decays, last, axis=2)[..., 0], 0.0)
    fading = jnp.exp(jnp.where(written, total[..., None] - added.decays, -jnp.inf))
    keys = jnp.repeat(added.keys, added.updates.shape[1] // added.keys.shape[1], axis=1)
    more = float32_einsum("bhmd,bhmv->bhdv", keys * fading[..., None], added.updates)
    states = prefix.states * jnp.exp(total)[..., None, None] + more

    def slid(window: jax.Array, inputs: jax.Array) -> jax.Array:
        both = jnp.concatenate([window, inputs], axis=2)
        return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, window.shape[2], axis=1))(
            both, counts
        )

    return RecurrentPrefix(states, tuple(map(slid, prefix.windows, added.inputs)))
