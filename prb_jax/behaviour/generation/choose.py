"""Choose the next token from logits. The rules are arrays: a changed value compiles nothing.

The rules apply in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p. One random number
draws the token by inverting the cumulative distribution; each row and step uses a separate key.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_REMOVED = -jnp.inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rules:
    """Sampling rules: scalars, or arrays [B, S] with a value for each row; see `SampleOptions.rules`."""

    # divides the logits; 0 takes the most probable token (greedy)
    temperature: jax.Array | np.ndarray | float = 1.0
    # keeps this many most probable tokens, plus ties with the last of them; 0 keeps all
    top_k: jax.Array | np.ndarray | int = 0
    # keeps the most probable tokens until their probabilities sum up to this; 1 keeps all
    top_p: jax.Array | np.ndarray | float = 1.0
    # keeps tokens of at least this share of the largest probability; 0 keeps all
    min_p: jax.Array | np.ndarray | float = 0.0
    # divides positive and multiplies negative logits of tokens that occurred before, also in the prompt; 1
    # changes nothing
    repetition_penalty: jax.Array | np.ndarray | float = 1.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """The next token of each row."""

    token: jax.Array  # int32 [B, S]
    # float32 [B, S], log-probability of the token under the unmodified model (temperature 1, no other rule)
    logprob: jax.Array
    # float32 [B, S], log-probability under the distribution the token was drawn from; 0 for a greedy choice
    sampled_logprob: jax.Array


def choose(logits: jax.Array, keys: jax.Array, seen: jax.Array, rules: Rules) -> Chosen:
    """Draw one token a row.

    Args:
      logits: Model logits, float32 [B, S, V].
      keys: Random keys [B, S].
      seen: Tokens that occurred before, bool [B, S, V].
      rules: Sampling rules.
    """
    greedy = jnp.broadcast_to(rules.temperature, logits.shape[:-1]) == 0
    kept = filtered(logits, seen, rules)
    best = first_largest(kept)
    top = kept.max(axis=-1, keepdims=True)
    weights = jnp.exp(kept - top)
    total = weights.sum(axis=-1)
    token = lax.cond(greedy.all(), lambda: best, lambda: jnp.where(greedy, best, _inverted(weights, keys)))

    def at_token(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0]

    drawn = at_token(kept) - top[..., 0] - jnp.log(total)
    logprob = at_token(logits) - jax.nn.logsumexp(logits, axis=-1)
    return Chosen(token, logprob, jnp.where(greedy, 0.0, drawn))


def first_largest(x: jax.Array) -> jax.Array:
    """Like :func:`jax.numpy.argmax` over the last axis, int32, but with maxima, which XLA runs in parallel on CPUs."""
    places = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    is_largest = (x == x.max(axis=-1, keepdims=True)) | (x != x)  # the first NaN, if any
    return jnp.where(is_largest, places, x.shape[-1]).min(axis=-1)


_BLOCK = 128
"""Weights are summed in blocks, and only one block is searched: no cumulative sum over the vocabulary is stored."""


def _inverted(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw one token a row with probability proportional to its weight, [B, S, V]; never a token of weight 0."""
    rows, vocab = keys.size, weights.shape[-1]
    padded = jnp.pad(weights.reshape(rows, vocab), ((0, 0), (0, -vocab % _BLOCK)))
    blocks = padded.reshape(rows, -1, _BLOCK)
    of_blocks = blocks.sum(axis=-1)
    until = jnp.cumsum(of_blocks, axis=-1)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.reshape(-1))
    target = uniform * until[:, -1]
    block = _first_beyond(until, of_blocks, target)
    before = jnp.where(
        block > 0, jnp.take_along_axis(until, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0
    )
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * _BLOCK + _first_beyond(jnp.cumsum(chosen, axis=-1), chosen, target - before)
    return token.reshape(keys.shape)


def _first_beyond(until: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """First position with weight > 0 whose cumulative sum `until` exceeds the target; else the last such position."""
    places = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    real = weights > 0  # rounding can put a target above the last sum, or an empty sum above the target
    first = jnp.where(real & (until > target[:, None]), places, weights.shape[1]).min(axis=1)
    return jnp.minimum(first, jnp.where(real, places, 0).max(axis=1))


def filtered(logits: jax.Array, seen: jax.Array, rules: Rules) -> jax.Array:
    """Return the logits [B, S, V] to draw tokens from: minus infinity for tokens that a rule removes.

    At temperature 0 the logits are not divided. Arguments are the same as for :func:`choose`.
    """
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    wide = {name: jnp.broadcast_to(value, shape) for name, value in vars(rules).items()}
    penalty = wide["repetition_penalty"][..., None]
    punished = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    greedy = wide["temperature"] == 0
    heated = punished / jnp.where(greedy, 1.0, wide["temperature"])[..., None]
    top_k = jnp.where(wide["top_k"] == 0, vocab, wide["top_k"])
    some_tokens = (top_k < vocab).any()
    kept = lax.cond(some_tokens, lambda x: _keep(x, jnp.ones_like(x), top_k), lambda x: x, heated)
    some_mass = (wide["top_p"] < 1).any()
    kept = lax.cond(
        some_mass,
        lambda x: jnp.where(wide["top_p"][..., None] < 1, _keep(x, jax.nn.softmax(x), wide["top_p"]), x),
        lambda x: x,
        kept,
    )
    # exp(x - max) >= min_p: the largest logit has the largest probability.
    floor = kept.max(axis=-1, keepdims=True) + jnp.log(wide["min_p"])[..., None]
    return jnp.where(kept >= floor, kept, _REMOVED)


def _keep(logits: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """Keep the logits [..., V] of tokens with less than ``limit`` [...] of ``weights`` above them; remove the others.

    Weights of one give top-k, probabilities give top-p. The most probable token always stays. Bisection over the bits
    of float32 finds the threshold in 32 passes, which is faster than sorting the vocabulary.
    """
    bits = lax.bitcast_convert_type(logits.astype(jnp.float32), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # int32 with the order of float32

    def above(threshold: jax.Array) -> jax.Array:
        return jnp.where(ordered > threshold[..., None], weights, 0).sum(axis=-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the smallest valid threshold is in (low, high]
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        holds = above(middle) < limit
        return jnp.where(holds, low, middle), jnp.where(holds, middle, high)

    shape = logits.shape[:-1]
    low = jnp.full(shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    _, threshold = lax.fori_loop(0, 33, halve, (low, ordered.max(axis=-1)))
    return jnp.where(ordered >= threshold[..., None], logits, _REMOVED)
