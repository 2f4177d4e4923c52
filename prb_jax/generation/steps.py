"""The sampler on the device: rows of one static shape, advanced token by token. All functions are pure.

A row is one sample of one tree. Its first step reads the last token of the prompt, which is the first column of its
suffix cache, so that no step is a special case. A row that is done stays as it is until it is filled again. The key of
a draw is ``fold_in(fold_in(fold_in(seed, prompt), sample), step)``: a sample does not depend on its neighbours, on the
shape of the batch, or on the devices.

Letters: B trees, S samples of each at a time, M columns of the suffix, V vocabulary, Q stop ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.generation.choose import Chosen, choose
from prb_jax.generation.rules import Rules
from prb_jax.models.attention.choice import Attention
from prb_jax.models.cache import (
    PrefixCache,
    SuffixCache,
    empty_prefix,
    empty_suffix,
    extend,
    fill_prefix,
    layers_of,
)
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.head import LanguageHead

AnyRows = TypeVar("AnyRows", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The static settings that all programs of a policy share.

    Attributes:
      config: architecture, with a :class:`prb_jax.models.head.LanguageHead`.
      dtype: of activations and caches.
      mesh: devices; None for one.
      attention: that reads prompts; None for the machine's own.
      lora_scale: of adapters, where the parameters have any.
      filler: see :func:`prb_jax.models.cache.fill_prefix`.
      copies_layers: cut the layers' weights out of their stacks once for many steps. CPUs would copy them for
        every token; accelerators read them in place, and have no memory for a second copy.
    """

    config: DecoderConfig
    dtype: jnp.dtype
    mesh: Mesh | None = None
    attention: Attention | None = None
    lora_scale: float = 1.0
    filler: int = 1
    copies_layers: bool = True

    @property
    def head(self) -> LanguageHead:
        """The head, which gives logits of the whole vocabulary."""
        assert isinstance(self.config.head, LanguageHead)
        return self.config.head


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Stops:
    """When a row is done.

    Attributes:
      ids: int32 [Q], tokens after which it is; -1 for none.
      tokens: int32, most tokens that are drawn, at most M.
    """

    ids: jax.Array
    tokens: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of B trees.

    Attributes:
      cache: of all their tokens but the last one.
      last: int32 [B], the last one.
      numbers: int32 [B], for the random keys.
      seen: bool [B, V], the tokens that occur in it.
    """

    cache: PrefixCache
    last: jax.Array
    numbers: jax.Array
    seen: jax.Array

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """B * S rows on their way.

    Attributes:
      cache: of the tokens read, from the last one of the prompt on.
      next: int32 [B, S], the token that is read next.
      numbers: int32 [B, S], numbers of the samples, for the random keys.
      seen: bool [B, S, V], tokens that occurred.
      done: bool [B, S].
      tokens: int32 [B, S, M], drawn so far; ``cache.lengths`` of them.
      logprobs, sampled_logprobs: float32 [B, S, M], see :class:`prb_jax.generation.choose.Chosen`.
    """

    cache: SuffixCache
    next: jax.Array
    numbers: jax.Array
    seen: jax.Array
    done: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    sampled_logprobs: jax.Array

    __repr__ = short_repr


def empty_prompts(program: Program, *, trees: int, columns: int) -> Prompts:
    """Return B = ``trees`` empty prompts of P = ``columns``."""
    config = program.config
    numbers = jnp.zeros((trees,), jnp.int32)
    return Prompts(
        cache=empty_prefix(config, trees=trees, columns=columns, dtype=program.dtype),
        last=numbers,
        numbers=numbers,
        seen=jnp.zeros((trees, config.vocab_size), bool),
    )


def empty_rows(program: Program, *, trees: int, samples: int, columns: int) -> Rows:
    """Return B * S = ``trees * samples`` rows that are done, of M = ``columns``."""
    config, shape = program.config, (trees, samples)
    numbers = jnp.zeros(shape, jnp.int32)
    return Rows(
        cache=empty_suffix(config, trees=trees, samples=samples, columns=columns, dtype=program.dtype),
        next=numbers,
        numbers=numbers,
        seen=jnp.zeros((*shape, config.vocab_size), bool),
        done=jnp.ones(shape, bool),
        tokens=jnp.zeros((*shape, columns), jnp.int32),
        logprobs=jnp.zeros((*shape, columns), jnp.float32),
        sampled_logprobs=jnp.zeros((*shape, columns), jnp.float32),
    )


def read_prompts(
    program: Program, params: Params, tokens: jax.Array, lengths: jax.Array, numbers: jax.Array
) -> Prompts:
    """Read prompts: tokens int32 [F, P + 1], right-aligned, ``lengths`` [F] of them real and at least one.

    Args:
      program: of the policy.
      params: its parameters.
      tokens, lengths: the prompts.
      numbers: int32 [F], for the random keys.
    """
    rows, width = tokens.shape
    cache = fill_prefix(
        params,
        tokens[:, :-1],
        lengths - 1,
        config=program.config,
        dtype=program.dtype,
        attention=program.attention,
        mesh=program.mesh,
        lora_scale=program.lora_scale,
        filler=program.filler,
    )
    real = jnp.arange(width) >= width - lengths[:, None]
    # A token beyond the vocabulary is dropped: padding marks nothing.
    marked = jnp.where(real, tokens, program.config.vocab_size)
    seen = jnp.zeros((rows, program.config.vocab_size), bool)
    seen = seen.at[jnp.arange(rows)[:, None], marked].set(True, mode="drop")
    return Prompts(cache=cache, last=tokens[:, -1], numbers=numbers, seen=seen)


def put_cache(held: PrefixCache, new: PrefixCache, trees: jax.Array) -> PrefixCache:
    """Put the caches of new prompts [F] in the place of ``trees`` int32 [F]; a number of B or more drops one."""
    skipped = held.columns - new.columns

    def put(old: jax.Array, fresh: jax.Array) -> jax.Array:
        return old.at[trees, :, skipped:].set(fresh, mode="drop")

    lengths = held.lengths.at[trees].set(new.lengths, mode="drop")
    return PrefixCache(
        tuple(map(put, held.keys, new.keys)), tuple(map(put, held.values, new.values)), lengths
    )


def put_prompts(held: Prompts, new: Prompts, trees: jax.Array) -> Prompts:
    """Put new prompts [F] in the place of ``trees`` int32 [F] among those held; a number of B or more drops one."""

    def put(old: jax.Array, fresh: jax.Array) -> jax.Array:
        return old.at[trees].set(fresh, mode="drop")

    return Prompts(
        cache=put_cache(held.cache, new.cache, trees),
        last=put(held.last, new.last),
        numbers=put(held.numbers, new.numbers),
        seen=put(held.seen, new.seen),
    )


def restart(rows: Rows, prompts: Prompts, which: jax.Array, numbers: jax.Array) -> Rows:
    """Begin new samples in the rows ``which`` bool [B, S]; ``numbers`` int32 [B, S] are theirs."""
    return replace(
        rows,
        cache=replace(rows.cache, lengths=jnp.where(which, 0, rows.cache.lengths)),
        next=jnp.where(which, prompts.last[:, None], rows.next),
        numbers=jnp.where(which, numbers, rows.numbers),
        seen=jnp.where(which[..., None], prompts.seen[:, None], rows.seen),
        done=rows.done & ~which,
    )


def ended(rows: Rows, which: jax.Array) -> Rows:
    """End the rows ``which`` bool [B, S]."""
    return replace(rows, done=rows.done | which)


def next_logits(
    program: Program, params: Params, layers: tuple[Params, ...], prompts: Prompts, rows: Rows
) -> tuple[jax.Array, SuffixCache]:
    """Read the next token of every row: logits float32 [B, S, V] of the one after it, and the cache with it."""
    states, cache = extend(
        params,
        layers,
        rows.next,
        prompts.cache,
        rows.cache,
        config=program.config,
        dtype=program.dtype,
        mesh=program.mesh,
        lora_scale=program.lora_scale,
    )
    return program.head.next_token(params, states), cache


def row_keys(seed: jax.Array, prompts: Prompts, rows: Rows) -> jax.Array:
    """Return the random key of each row's next draw, [B, S]."""
    fold = jax.random.fold_in
    key = jax.random.key(seed)
    of_tree = jax.vmap(functools.partial(fold, key))(prompts.numbers)
    of_row = jax.vmap(jax.vmap(fold, (None, 0)))(of_tree, rows.numbers)
    return jax.vmap(jax.vmap(fold))(of_row, rows.cache.lengths)


def advance(rows: Rows, cache: SuffixCache, chosen: Chosen, stops: Stops) -> Rows:
    """Add the chosen token to every row that is not done."""
    going, place = ~rows.done, rows.cache.lengths
    columns, vocab = rows.tokens.shape[-1], rows.seen.shape[-1]
    here = (jnp.arange(columns) == place[..., None]) & going[..., None]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(here, new[..., None], old)

    lengths = jnp.where(going, place + 1, place)
    token = jnp.where(going, chosen.token, rows.next)
    marked = jnp.where(going, token, vocab)
    stopped = (token[..., None] == stops.ids).any(axis=-1) | (lengths >= stops.tokens)
    return replace(
        rows,
        cache=replace(cache, lengths=lengths),
        next=token,
        seen=jax.vmap(jax.vmap(lambda seen, token: seen.at[token].set(True, mode="drop")))(rows.seen, marked),
        done=rows.done | stopped,
        tokens=put(rows.tokens, chosen.token),
        logprobs=put(rows.logprobs, chosen.logprob),
        sampled_logprobs=put(rows.sampled_logprobs, chosen.sampled_logprob),
    )


def step(
    program: Program,
    params: Params,
    layers: tuple[Params, ...],
    prompts: Prompts,
    rows: Rows,
    *,
    rules: Rules,
    stops: Stops,
    seed: jax.Array,
) -> Rows:
    """Draw one token for every row that is not done."""
    logits, cache = next_logits(program, params, layers, prompts, rows)
    chosen = choose(logits, row_keys(seed, prompts, rows), rows.seen, rules)
    return advance(rows, cache, chosen, stops)


def run_steps(
    program: Program,
    params: Params,
    prompts: Prompts,
    rows: Rows,
    *,
    rules: Rules,
    stops: Stops,
    seed: jax.Array,
    most: jax.Array,
    watched: jax.Array,
) -> Rows:
    """Draw up to ``most`` tokens a row, and stop before that where all rows are done.

    Args:
      program, params: the policy.
      prompts, rows: where it stands.
      rules, stops: how tokens are drawn, and until when.
      seed: int32, of the random keys.
      most: int32, steps.
      watched: bool [B, S], rows that the caller can fill again: stop as soon as one of them is done.
    """
    layers = layers_of(params) if program.copies_layers else None

    def body(now: Rows) -> Rows:
        own = layers_of(params) if layers is None else layers
        return step(program, params, own, prompts, now, rules=rules, stops=stops, seed=seed)

    return repeat_steps(body, rows, most=most, watched=watched)


def repeat_steps(
    body: Callable[[AnyRows], AnyRows], rows: AnyRows, *, most: jax.Array, watched: jax.Array
) -> AnyRows:
    """Repeat a step of rows with ``done`` bool [B, S]; ``most`` and ``watched`` as of :func:`run_steps`."""

    def goes_on(carry: tuple[jax.Array, AnyRows]) -> jax.Array:
        count, now = carry
        return (count < most) & ~now.done.all() & ~(now.done & watched).any()

    def again(carry: tuple[jax.Array, AnyRows]) -> tuple[jax.Array, AnyRows]:
        count, now = carry
        return count + 1, body(now)

    return lax.while_loop(goes_on, again, (jnp.int32(0), rows))[1]
