"""Caches of texts that grow chunk by chunk: neither policy nor reward model rereads the prompt and the text.

Each text is a tree whose samples are the candidates for its next chunk. The keys and values of the chosen candidate are
appended to the prompt's cache. The reward model reads conversations as `prb evaluate` does, so each chunk retokenises
the text. Tokens shared with the cache are not read again, whatever the tokenizer.

Letters: B texts, C candidates, P columns of prompts, M columns of candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.generation.programs import (
    Shape,
    Task,
    make_cache_programs,
    make_programs,
    program_shardings,
)
from prb_jax.behaviour.generation.schedule import Drawn, DrawnRows
from prb_jax.behaviour.generation.steps import Program, Prompts, Rows, token_rewards
from prb_jax.behaviour.generation.token_scores import reward_program
from prb_jax.models.cache import PrefixCache, SuffixCache, keep_suffix, take_tried, try_tokens
from prb_jax.models.decoder import Params
from prb_jax.platform.processes.sharing import fetch
from prb_jax.platform.sharding import batch_sharding, replicated, to_global
from prb_jax.records.comparison import Comparison
from prb_jax.runs.progress import compiling
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.tree import Tree, common_run, round_up

TAIL: Final = 32
"""Spare columns: for template tokens after a response, and for reward tokenizers that need more tokens for a text."""


class PolicyCaches:
    """The policy's caches of up to B texts.

    Args:
      policy: Policy that draws.
      shape: B trees and C samples, with prompt columns for whole texts.
      task: The prompt of each text, and how tokens are drawn.
    """

    def __init__(self, policy: Policy, shape: Shape, task: Task) -> None:
        self.policy, self.shape, self.task = policy, shape, task
        self._programs = make_programs(policy.program, shape)
        prompts, self._rows = self._programs.empty(task)
        places = {place: place for place in range(len(task.prompts))}
        reader = self._programs.reader(policy.params, task, places)
        self._prompts = reader.fill(prompts, places)

    def draw(self, places: Sequence[int], *, size: int, seed: int) -> list[list[Drawn]]:
        """Draw C candidates of at most ``size`` tokens for each of these texts; stop texts do not end them."""
        shape = (self.shape.trees, self.shape.samples)
        which = np.zeros(shape, bool)
        which[list(places)] = True
        numbers = np.ascontiguousarray(np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape))
        rows = self._programs.restart(self._rows, self._prompts, which, numbers)
        task = replace(self.task, options=replace(self.task.options, max_new_tokens=size, seed=seed))
        self._rows = self._programs.run(
            self.policy.params, self._prompts, rows, task, most=size, watched=np.zeros(shape, bool)
        )
        drawn = DrawnRows(self._rows, task)
        return [[drawn.drawn(place, k, prompt=place, sample=k) for k in range(shape[1])] for place in places]

    def keep(self, chosen: Mapping[int, int]) -> None:
        """Continue each of these texts with a candidate: maps the place of a text to the number of its candidate."""
        which, counts = np.zeros((2, self.shape.trees), np.int32)
        lengths = fetch(self._rows.cache.lengths)
        for place, sample in chosen.items():
            which[place], counts[place] = sample, lengths[place, sample]
        self._prompts = _keep_program(self.policy.program)(self._prompts, self._rows, which, counts)


@dataclass(eq=False)
class _Held:
    """Tokens of one text that were read: the prompt, each candidate, and which candidate was chosen."""

    ids: np.ndarray
    candidates: Sequence[np.ndarray] = field(default_factory=list)
    chosen: int | None = None

    @property
    def known(self) -> np.ndarray:
        return self.ids if self.chosen is None else np.concatenate([self.ids, self.candidates[self.chosen]])


class RewardCaches:
    """A reward model's caches of up to B texts.

    Args:
      model: Decoder whose head reads one token.
      shape: Shape of the policy's caches.
      room: Maximum tokens of a text.
    """

    def __init__(self, model: RewardModel, shape: Shape, *, room: int) -> None:
        self.model, self._room = model, room
        self._program = reward_program(model)
        self._shape = replace(shape, columns=round_up(shape.columns + TAIL, 16))
        self._held: dict[int, _Held] = {}
        self._longest, self._stream = 0, None  # prompt tokens, and tokens of the streams that read prompts
        self._prefix: Any = None
        self._suffix: Any = None

    def score(self, asked: Sequence[Comparison], *, places: Sequence[int]) -> list[np.ndarray]:
        """Return the rewards float32 [K] of the responses, K at most C, for each text's comparison."""
        trees = self.model.encode(asked)
        self._make_room(trees)
        rests = self._bring_up(places, trees)
        shape = (self._shape.trees, self._shape.samples)
        tokens, ends = np.zeros((*shape, self._shape.columns), np.int32), np.zeros(shape, np.int32)
        for place, tree, rest in zip(places, trees, rests, strict=True):
            begun = len(self._held[place].ids) - len(tree.prefix)
            for k, ids in enumerate(rest):
                tokens[place, k, : len(ids)] = ids
                ends[place, k] = tree.read[k] - begun
        placed = (to_global(x, batch_sharding(self.model.mesh, x.ndim)) for x in (tokens, ends))
        run = _reward_program(self._program, self.model.readout)
        with compiling(run, tokens.shape, self._prefix.columns):
            rewards, self._suffix = run(
                self.model.params, self._prefix, self._suffix, *placed, np.int32(1 + ends.max())
            )
        now = dict(zip(places, rests, strict=True))
        self._held = {place: _Held(held.ids, now.get(place, ())) for place, held in self._held.items()}
        values = fetch(rewards)
        return [values[place, : len(rest)].copy() for place, rest in zip(places, rests, strict=True)]

    def keep(self, place: int, response: int | None) -> None:
        """Record which response of the last comparison continues a text; None if that response was not scored."""
        if place in self._held:
            self._held[place].chosen = response

    def _make_room(self, trees: Sequence[Tree]) -> None:
        """Replace caches that are too small with larger, empty ones; all texts are then read again."""
        longest = max(len(tree.prefix) for tree in trees)
        width = max(len(response) for tree in trees for response in tree.responses)
        before = 0 if self._prefix is None else self._prefix.columns
        if longest <= before and width <= self._shape.columns:
            return
        self._shape = replace(self._shape, columns=max(self._shape.columns, round_up(width, 16)))
        self._longest, self._stream = max(longest + self._room + TAIL - 1, before), None
        self._prefix, self._suffix = make_cache_programs(self._program, self._shape).empty(self._longest)
        self._held = {}

    def _bring_up(self, places: Sequence[int], trees: Sequence[Tree]) -> list[list[np.ndarray]]:
        """Extend the prompt cache to the start of each conversation, and return the rest of each response."""
        which, counts = np.zeros((2, self._shape.trees), np.int32)
        again: dict[int, np.ndarray] = {}
        for place, tree in zip(places, trees, strict=True):
            held = self._held.get(place)
            run = 0 if held is None else common_run([held.known, tree.prefix])
            left = len(tree.prefix) - run + max(map(len, tree.responses))
            if held is None or run < len(held.ids) or left > self._shape.columns:
                again[place] = tree.prefix
                self._held[place] = _Held(tree.prefix)
            else:
                which[place], counts[place] = held.chosen or 0, run - len(held.ids)
                self._held[place] = _Held(tree.prefix[:run])
        if counts.any():
            self._prefix = _keep_reward_program(self._program)(self._prefix, self._suffix, which, counts)
        if again:
            programs = make_cache_programs(self._program, self._shape)
            self._stream = self._stream or programs.length(list(again.values()), longest=self._longest)
            sizes = {"longest": self._longest, "tokens": self._stream}
            reader = programs.reader(self.model.params, again, **sizes)
            self._prefix = reader.fill(self._prefix, {place: place for place in again})
        return [
            [np.concatenate([tree.prefix[len(self._held[place].ids) :], ids]) for ids in tree.responses]
            for place, tree in zip(places, trees, strict=True)
        ]


@functools.lru_cache(maxsize=16)
def _keep_program(program: Program) -> Callable[..., Prompts]:
    """(prompts, rows, which [B], counts [B]) -> prompts followed by the chosen rows."""

    def keep(prompts: Prompts, rows: Rows, which: jax.Array, counts: jax.Array) -> Prompts:
        trees, goes_on = jnp.arange(len(which)), counts > 0
        return replace(
            prompts,
            cache=keep_suffix(prompts.cache, rows.cache, which, counts),
            last=jnp.where(goes_on, rows.next[trees, which], prompts.last),
            seen=jnp.where(goes_on[:, None], rows.seen[trees, which], prompts.seen),
        )

    return jax.jit(keep, donate_argnums=(0,), out_shardings=program_shardings(program)[0])


@functools.lru_cache(maxsize=16)
def _keep_reward_program(program: Program) -> Callable[..., PrefixCache]:
    """(prefix, suffix, which [B], counts [B]) -> prefix."""
    return jax.jit(keep_suffix, donate_argnums=(0,), out_shardings=program_shardings(program)[0].cache)


@functools.lru_cache(maxsize=16)
def _reward_program(program: Program, readout: str) -> Callable[..., tuple[jax.Array, SuffixCache]]:
    """(params, prefix, suffix, tokens [B, C, M], ends [B, C], count) -> rewards [B, C] at the ends, and the suffix."""

    def read(
        params: Params,
        prefix: PrefixCache,
        suffix: SuffixCache,
        tokens: jax.Array,
        ends: jax.Array,
        count: jax.Array,
    ) -> tuple[jax.Array, SuffixCache]:
        layers, shape = program.layers(params), ends.shape
        begun = replace(suffix, lengths=jnp.zeros_like(suffix.lengths))

        def step(carry: tuple[jax.Array, SuffixCache, jax.Array]) -> tuple[jax.Array, SuffixCache, jax.Array]:
            number, now, states = carry
            ids = lax.dynamic_slice_in_dim(tokens, number, 1, axis=2)
            tried = try_tokens(params, layers(), ids, now.lengths[..., None], prefix, now, **program.settings)
            states = jnp.where((ends == number)[..., None], tried.states[:, :, 0], states)
            return number + 1, take_tried(now, tried, jnp.zeros(shape, jnp.int32)), states

        blank = jnp.zeros((*shape, program.config.hidden_size), program.dtype)
        _, kept, states = lax.while_loop(lambda carry: carry[0] < count, step, (jnp.int32(0), begun, blank))
        return token_rewards(program.config, readout, params, states), kept

    behind = program_shardings(program)[1].cache
    return jax.jit(read, donate_argnums=(2,), out_shardings=(replicated(program.mesh), behind))
