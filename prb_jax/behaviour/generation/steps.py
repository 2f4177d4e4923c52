"""The sampler on the device: rows of one static shape, advanced token by token. All functions are pure.

A row is one sample of one tree. The first step reads the last token of the prompt, which is the first column of the
suffix cache, so no step is a special case. A finished row stays unchanged until it is refilled. The key of a draw is
``fold_in(fold_in(fold_in(seed, prompt), sample), step)``: a sample does not depend on its neighbours, on the shape of
the batch, or on the devices.

A reward model may guide every token (ARGS, Khanov et al. 2024). The score of each of the C most likely tokens is
log pi(v | x, y_<t) + w r(x, y_<t v). Each model keeps a separate cache. The candidates of a step are a tree of
one-token responses on the reward model's cache: one pass tries them all. The keys and values of the chosen candidate
are kept, so it is not read again.

Letters: B trees, S samples of each at a time, M columns of the suffix, V vocabulary, Q stop ids, C candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from prb_jax.behaviour.generation.choose import Chosen, Rules, choose
from prb_jax.errors import short_repr
from prb_jax.models.cache import (
    Moves,
    PrefixCache,
    StreamCache,
    SuffixCache,
    empty_prefix,
    empty_suffix,
    extend,
    layers_of,
    put_prefixes,
    put_rows,
    read_stream,
    take_tried,
    try_tokens,
)
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.head import States, read_out
from prb_jax.models.model import bind
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.trees.streams import StreamBatch


@dataclass(frozen=True, kw_only=True)
class Program:
    """The static settings of a model that runs token by token."""

    config: (
        DecoderConfig  # architecture; a policy has a :class:`prb_jax.models.vocabulary_heads.LanguageHead`
    )
    dtype: jnp.dtype  # type of activations and caches
    mesh: Mesh  # devices
    attention: str = "auto"  # attention for reading prompts, one of :data:`prb_jax.models.ATTENTIONS`
    lora_scale: float = 1.0  # scale of adapters, if the parameters have any
    # slice the layers' weights out of their stacks once for many steps. CPUs would copy them for every token;
    # accelerators read them in place, and lack memory for a second copy.
    copies_layers: bool = True

    @property
    def head(self) -> LanguageHead:
        """The head of a policy, which returns logits of the whole vocabulary."""
        assert isinstance(self.config.head, LanguageHead)
        return self.config.head

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments for the functions of :mod:`prb_jax.models.cache` that run the model."""
        return {"config": self.config, **self.forward}

    @property
    def forward(self) -> dict[str, Any]:
        """Keyword arguments for :func:`prb_jax.models.decoder.decode_stream`; its decoder contains the config."""
        return {"dtype": self.dtype, "mesh": self.mesh, "lora_scale": self.lora_scale}

    def read(self, params: Params, batch: StreamBatch) -> StreamCache:
        """Read prompts; see :func:`prb_jax.models.cache.read_stream`."""
        return read_stream(params, batch, **self.settings)

    def layers(self, params: Params) -> Callable[[], tuple[nnx.State, ...]]:
        """Return a function that returns the weights of each layer inside a loop over tokens."""
        cut = layers_of(bind(self.config, params)) if self.copies_layers else None
        return lambda: layers_of(bind(self.config, params)) if cut is None else cut


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """The static settings of a reward model that guides every token."""

    reward: Program  # the reward model
    readout: str  # how its logits become a reward
    candidates: int  # C, number of most likely tokens to try at each step


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Stops:
    """Conditions that end a row."""

    ids: jax.Array  # int32 [Q], tokens that end a row; -1 for none
    tokens: jax.Array  # int32, maximum tokens to draw, at most M


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of B trees."""

    cache: PrefixCache  # all tokens except the last
    last: jax.Array  # int32 [B], the last token
    numbers: jax.Array  # int32 [B], for the random keys
    seen: jax.Array  # bool [B, V], tokens that occur in the prompt
    reward: PrefixCache | None = None  # the whole prompts as a guiding reward model reads them

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NewPrompts:
    """Prompts that were read in streams, and their target trees: F from each of S streams. int32 arrays."""

    moves: Moves  # moves of all tokens except the last
    tokens: np.ndarray | jax.Array  # [S, F, P + 1], right-aligned
    numbers: np.ndarray | jax.Array  # [S, F], for the random keys

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """B * S rows in progress."""

    cache: SuffixCache  # tokens read so far, starting with the last one of the prompt
    next: jax.Array  # int32 [B, S], the token to read next
    numbers: jax.Array  # int32 [B, S], numbers of the samples, for the random keys
    seen: jax.Array  # bool [B, S, V], tokens that occurred
    done: jax.Array  # bool [B, S]
    tokens: jax.Array  # int32 [B, S, M], drawn so far; ``cache.lengths`` of them
    # logprobs, sampled_logprobs: float32 [B, S, M], see :class:`prb_jax.behaviour.generation.choose.Chosen`
    logprobs: jax.Array
    sampled_logprobs: jax.Array
    reward: SuffixCache | None = None  # the tokens drawn as a guiding reward model reads them

    __repr__ = short_repr


def empty_prompts(program: Program, *, trees: int, columns: int) -> Prompts:
    """Return B = ``trees`` empty prompts with P = ``columns``."""
    numbers = jnp.zeros((trees,), jnp.int32)
    return Prompts(
        cache=empty_prefix(program.config, trees=trees, columns=columns, dtype=program.dtype),
        last=numbers,
        numbers=numbers,
        seen=jnp.zeros((trees, program.config.vocab_size), bool),
    )


def empty_rows(program: Program, *, trees: int, samples: int, columns: int) -> Rows:
    """Return B * S = ``trees * samples`` finished rows with M = ``columns``."""
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


def put_prompts(held: Prompts, stream: StreamCache, new: NewPrompts) -> Prompts:
    """Return the held prompts, some of them replaced by new ones that were read in a stream."""
    vocab, width = held.seen.shape[1], new.tokens.shape[2]
    tokens, trees = jnp.asarray(new.tokens), jnp.asarray(new.moves.trees)
    real = jnp.arange(width) >= width - 1 - jnp.asarray(new.moves.lengths)[..., None]
    # Padding gets an id beyond the vocabulary, which `mode="drop"` ignores.
    mark = jax.vmap(jax.vmap(lambda ids: jnp.zeros(vocab, bool).at[ids].set(True, mode="drop")))
    return replace(
        held,
        cache=put_prefixes(held.cache, stream, new.moves),
        last=put_rows(held.last, tokens[..., -1], trees),
        numbers=put_rows(held.numbers, jnp.asarray(new.numbers), trees),
        seen=put_rows(held.seen, mark(jnp.where(real, tokens, vocab)), trees),
    )


def restart(rows: Rows, prompts: Prompts, which: jax.Array, numbers: jax.Array) -> Rows:
    """Start new samples with the numbers ``numbers`` int32 [B, S] in the rows ``which`` bool [B, S]."""

    def emptied(cache: SuffixCache) -> SuffixCache:
        return replace(cache, lengths=jnp.where(which, 0, cache.lengths))

    return replace(
        rows,
        cache=emptied(rows.cache),
        next=jnp.where(which, prompts.last[:, None], rows.next),
        numbers=jnp.where(which, numbers, rows.numbers),
        seen=jnp.where(which[..., None], prompts.seen[:, None], rows.seen),
        done=rows.done & ~which,
        reward=None if rows.reward is None else emptied(rows.reward),
    )


def ended(rows: Rows, which: jax.Array) -> Rows:
    """End the rows ``which`` bool [B, S]."""
    return replace(rows, done=rows.done | which)


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
    guidance: Guidance | None = None,
    reward: tuple[Params, jax.Array] | None = None,
) -> Rows:
    """Draw up to ``most`` tokens a row; stop earlier if all rows are done.

    Args:
      program, params: The policy.
      prompts, rows: Current state.
      rules, stops: How tokens are drawn, and when a row ends.
      seed, most: Seed of the random keys, and maximum steps, int32.
      watched: Rows that the caller can refill, bool [B, S]: stop as soon as one of them is done.
      guidance, reward: Settings of a guiding reward model, if any; its parameters and its weight w, float32.
    """
    layers = program.layers(params)
    guide = None if guidance is None or reward is None else _guide(guidance, *reward)

    def step(now: Rows) -> Rows:
        states, cache = extend(params, layers(), now.next, prompts.cache, now.cache, **program.settings)
        logits, keys = program.head.next_token(params, states), row_keys(seed, prompts, now)
        if guide is None:
            return advance(now, cache, choose(logits, keys, now.seen, rules), stops)
        chosen, grown = guide(logits, keys, prompts, now, rules)
        return replace(advance(now, cache, chosen, stops), reward=grown)

    def goes_on(carry: tuple[jax.Array, Rows]) -> jax.Array:
        count, now = carry
        return (count < most) & ~now.done.all() & ~(now.done & watched).any()

    return lax.while_loop(goes_on, lambda carry: (carry[0] + 1, step(carry[1])), (jnp.int32(0), rows))[1]


def _guide(
    guidance: Guidance, params: Params, weight: jax.Array
) -> Callable[..., tuple[Chosen, SuffixCache]]:
    """(logits, keys, prompts, rows, rules) -> tokens that reward model and policy choose, and the reward cache."""
    reward = guidance.reward
    layers = reward.layers(params)

    def choose_guided(
        logits: jax.Array, keys: jax.Array, prompts: Prompts, rows: Rows, rules: Rules
    ) -> tuple[Chosen, SuffixCache]:
        assert prompts.reward is not None
        assert rows.reward is not None
        likely, ids = lax.top_k(logits, guidance.candidates)
        places = jnp.broadcast_to(rows.reward.lengths[..., None], ids.shape)
        tried = try_tokens(params, layers(), ids, places, prompts.reward, rows.reward, **reward.settings)
        rewards = token_rewards(reward.config, guidance.readout, params, tried.states)
        tree, sample = (jnp.arange(size) for size in ids.shape[:2])
        guided = jnp.full_like(logits, -jnp.inf)
        guided = guided.at[tree[:, None, None], sample[None, :, None], ids].set(likely + weight * rewards)
        chosen = choose(guided, keys, rows.seen, rules)
        alone = jnp.take_along_axis(logits, chosen.token[..., None], axis=-1)[..., 0]
        grown = take_tried(rows.reward, tried, jnp.argmax(ids == chosen.token[..., None], axis=-1))
        lengths = jnp.where(rows.done, rows.reward.lengths, grown.lengths)
        logprob = alone - jax.nn.logsumexp(logits, axis=-1)
        return replace(chosen, logprob=logprob), replace(grown, lengths=lengths)

    return choose_guided


def token_rewards(config: DecoderConfig, readout: str, params: Params, states: jax.Array) -> jax.Array:
    """Return the rewards float32 [B, ...] of a pointwise head at states [B, ..., D], taken before the last norm."""
    assert config.head is not None
    flat = states.reshape(states.shape[0], -1, states.shape[-1])
    everywhere = _Everywhere(flat, bind(config, params).normed)
    return read_out(config.head(params, cast(States, everywhere)), readout).reshape(states.shape[:-1])


@dataclass(frozen=True)
class _Everywhere:
    """States in the form that a pointwise head expects; every state is a read position."""

    hidden: jax.Array
    norm: Callable[[jax.Array], jax.Array]

    def read(self) -> jax.Array:
        return self.norm(self.hidden)
