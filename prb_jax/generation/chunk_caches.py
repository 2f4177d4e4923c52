"""Caches of texts that grow chunk by chunk: neither policy nor reward model reads prompt and text again.

Each text is a tree whose samples are the candidates for its next chunk. The keys and values of the chosen one go behind
those of the prompt. The reward model reads conversations as `prb evaluate` does, tokenised anew for every chunk: what
their tokens have in common with those in the cache is not read again, whatever the tokenizer.

Letters: B texts, C candidates, P columns of prompts, M columns of candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.data.comparison import Comparison
from prb_jax.generation.guided import reward_programs
from prb_jax.generation.policy import Policy
from prb_jax.generation.programs import Shape, make_program, make_programs, program_shardings, prompt_columns
from prb_jax.generation.prompts import Prompt
from prb_jax.generation.rules import SampleOptions
from prb_jax.generation.schedule import Drawn, as_rules
from prb_jax.generation.steps import Program, Prompts, Rows, Stops
from prb_jax.generation.token_scores import token_rewards
from prb_jax.models.cache import PrefixCache, SuffixCache, keep_suffix, layers_of, take_tried, try_tokens
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.processes.sharing import fetch
from prb_jax.readouts.score_tree import is_pointwise
from prb_jax.runs.progress import compiling
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import batch_sharding, replicated, to_global
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.trees.shapes import round_up
from prb_jax.trees.tree import Tree, common_run

TAIL: Final = 32
"""Columns for tokens of a reward model's template behind a response, and for a text that it cuts into more tokens."""


def chunk_shape(
    policy: Policy,
    prompts: Sequence[Prompt],
    options: SampleOptions,
    *,
    candidates: int,
    chunk: int,
    rows: int | None,
) -> Shape:
    """Return the static sizes for texts of these prompts: so many grow side by side as the shape has trees.

    Args:
      policy: that draws.
      prompts, options, rows: as of :meth:`prb_jax.generation.policy.Policy.draw`.
      candidates: C.
      chunk: most tokens of a chunk.
    """
    drawing = replace(options, n=candidates, max_new_tokens=chunk)
    shape = policy.shape(prompts, drawing, rows)
    longest = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
    columns = round_up(prompt_columns(longest), policy.mesh.shape["sequence"])
    return replace(shape, samples=candidates, prompt_columns=columns)


class PolicyCaches:
    """The policy's caches of at most B texts.

    Args:
      policy: that draws.
      shape: of :func:`chunk_shape`.
      prompts: one for each text.
      numbers: of the texts, for the random keys.
      options: how tokens are drawn.
    """

    def __init__(
        self,
        policy: Policy,
        shape: Shape,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        options: SampleOptions,
    ) -> None:
        self.policy, self.shape = policy, shape
        self._programs = make_programs(policy.program, shape)
        self._rules, self._stop_ids = as_rules(options.rules), policy.stops(options)
        self._prompts, self._rows = self._programs.empty()
        for place, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
            self._read(place, prompt.ids, number)

    def _read(self, place: int, ids: np.ndarray, number: int) -> None:
        columns, together = self.shape.reading(len(ids))
        tokens = np.zeros((together, columns + 1), np.int32)
        tokens[0, columns + 1 - len(ids) :] = ids
        lengths, numbers = np.ones(together, np.int32), np.zeros(together, np.int32)
        trees = np.full(together, self.shape.trees, np.int32)
        lengths[0], numbers[0], trees[0] = len(ids), number, place
        self._prompts = self._programs.read(
            self.policy.params, self._prompts, tokens, lengths, numbers, trees
        )

    def draw(self, places: Sequence[int], *, size: int, seed: int) -> list[list[Drawn]]:
        """Draw C candidates of at most ``size`` tokens behind each of these texts."""
        shape = (self.shape.trees, self.shape.samples)
        which = np.zeros(shape, bool)
        which[list(places)] = True
        samples = np.ascontiguousarray(np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape))
        rows = self._programs.restart(self._rows, self._prompts, which, samples)
        stops = Stops(
            ids=np.asarray(self._stop_ids or (-1,), np.int32),  # pyright: ignore[reportArgumentType]
            tokens=np.int32(size),  # pyright: ignore[reportArgumentType]
        )
        self._rows = rows = self._programs.run(
            self.policy.params,
            self._prompts,
            rows,
            rules=self._rules,
            stops=stops,
            seed=np.int32(seed),
            most=np.int32(size),
            watched=np.zeros(shape, bool),
        )
        lengths, tokens = fetch(rows.cache.lengths), fetch(rows.tokens)
        logprobs, sampled = fetch(rows.logprobs), fetch(rows.sampled_logprobs)

        def one(place: int, sample: int) -> Drawn:
            drawn = tokens[place, sample, : lengths[place, sample]].copy()
            return Drawn(
                prompt=place,
                sample=sample,
                tokens=drawn,
                logprobs=logprobs[place, sample, : len(drawn)].copy(),
                sampled_logprobs=sampled[place, sample, : len(drawn)].copy(),
                finish="stop" if drawn[-1] in self._stop_ids else "length",
            )

        return [[one(place, sample) for sample in range(shape[1])] for place in places]

    def keep(self, chosen: dict[int, int]) -> None:
        """Go on behind the candidate of each of these texts: its place, and the number of the candidate."""
        which, counts = np.zeros((2, self.shape.trees), np.int32)
        lengths = fetch(self._rows.cache.lengths)
        for place, sample in chosen.items():
            which[place], counts[place] = sample, lengths[place, sample]
        self._prompts = _keep_program(self.policy.program)(self._prompts, self._rows, which, counts)


def reads_by_caches(model: Any) -> bool:
    """Tell whether a reward model can read conversations token by token: a decoder whose head reads one token."""
    return (
        isinstance(model, RewardModel)
        and isinstance(model.tokenizer, ChatTokenizer)
        and isinstance(model.config, DecoderConfig)
        and is_pointwise(model.config)
    )


@dataclass(eq=False)
class _Held:
    """The tokens of one text that were read: those of the prompt, and of each candidate; which one was chosen."""

    ids: np.ndarray
    candidates: list[np.ndarray]
    chosen: int | None = None

    @property
    def known(self) -> np.ndarray:
        if self.chosen is None:
            return self.ids
        return np.concatenate([self.ids, self.candidates[self.chosen]])


class RewardCaches:
    """A reward model's caches of at most B texts.

    Args:
      model: that is suited, see :func:`reads_by_caches`.
      policy: whose texts are read.
      shape: of the policy's caches.
      options: how texts are drawn.
    """

    def __init__(self, model: RewardModel, policy: Policy, shape: Shape, options: SampleOptions) -> None:
        self.model, self.policy, self.options = model, policy, options
        self._reward = make_program(model.decoder, mesh=model.mesh, dtype=jnp.dtype(model.dtype))
        self._shape = replace(shape, columns=round_up(shape.columns + TAIL, 16))
        self._held: dict[int, _Held] = {}
        self._columns = 0
        self._prefix: Any = None
        self._suffix: Any = None

    def score(self, places: Sequence[int], asked: Sequence[Comparison]) -> list[np.ndarray]:
        """Return the rewards float32 [K] of the responses, at most C, of each text's comparison."""
        trees = self.model.encode(asked)
        self._make_room(trees)
        rests = self._brought_up(places, trees)
        shape = (self._shape.trees, self._shape.samples)
        tokens, ends = np.zeros((*shape, self._shape.columns), np.int32), np.zeros(shape, np.int32)
        for place, tree, rest in zip(places, trees, rests, strict=True):
            begun = len(self._held[place].ids) - len(tree.prefix)
            for k, ids in enumerate(rest):
                tokens[place, k, : len(ids)] = ids
                ends[place, k] = tree.read[k] - begun
        count = np.int32(1 + ends.max())
        placed = (to_global(x, batch_sharding(self.model.mesh, x.ndim)) for x in (tokens, ends))
        run = _reward_program(self._reward, self.model.readout)
        with compiling(run, tokens.shape, self._columns):
            rewards, self._suffix = run(self.model.params, self._prefix, self._suffix, *placed, count)
        found = fetch(rewards)
        now = dict(zip(places, rests, strict=True))
        self._held = {place: _Held(held.ids, now.get(place, [])) for place, held in self._held.items()}
        return [found[place, : len(rest)].copy() for place, rest in zip(places, rests, strict=True)]

    def choose(self, place: int, response: int | None) -> None:
        """Say which response of its last comparison a text goes on with; None for one that was not asked for."""
        if place in self._held:
            self._held[place].chosen = response

    def _make_room(self, trees: Sequence[Tree]) -> None:
        """Begin with larger caches where these are too small, and then all is read again."""
        columns = max(len(tree.prefix) for tree in trees)
        width = max(len(response) for tree in trees for response in tree.responses)
        if columns <= self._columns and width <= self._shape.columns:
            return
        room = prompt_columns(columns + self.options.max_new_tokens + TAIL)
        self._columns = max(self._columns, round_up(room, self.model.mesh.shape["sequence"]))
        self._shape = replace(self._shape, columns=max(self._shape.columns, round_up(width, 16)))
        self._prefix, self._suffix = self._made.empty(self._columns)
        self._held = {}

    def _brought_up(self, places: Sequence[int], trees: Sequence[Tree]) -> list[list[np.ndarray]]:
        """Bring the cache of prompts to the beginning of the conversations, and return the rest of each response."""
        which, counts = np.zeros((2, self._shape.trees), np.int32)
        again: list[tuple[int, np.ndarray]] = []
        for place, tree in zip(places, trees, strict=True):
            held = self._held.get(place)
            run = 0 if held is None else common_run([held.known, tree.prefix])
            left = len(tree.prefix) - run + max(map(len, tree.responses))
            if held is None or run < len(held.ids) or left > self._shape.columns:
                again.append((place, tree.prefix))
                self._held[place] = _Held(tree.prefix, [])
            else:
                which[place], counts[place] = held.chosen or 0, run - len(held.ids)
                self._held[place] = _Held(tree.prefix[:run], [])
        if counts.any():
            self._prefix = _keep_reward_program(self._reward)(self._prefix, self._suffix, which, counts)
        for place, ids in again:
            self._read(place, ids)
        return [
            [np.concatenate([tree.prefix[len(self._held[place].ids) :], ids]) for ids in tree.responses]
            for place, tree in zip(places, trees, strict=True)
        ]

    def _read(self, place: int, ids: np.ndarray) -> None:
        parts = self._shape.parts
        width = min(round_up(prompt_columns(len(ids) + 1), self.model.mesh.shape["sequence"]), self._columns)
        tokens = np.zeros((parts, width), np.int32)
        tokens[0, width - len(ids) :] = ids
        lengths, trees = np.ones(parts, np.int32), np.full(parts, self._shape.trees, np.int32)
        lengths[0], trees[0] = len(ids), place
        with compiling(self._made.read, tokens.shape):
            self._prefix = self._made.read(self.model.params, self._prefix, tokens, lengths, trees)

    @property
    def _made(self) -> Any:
        return reward_programs(self.policy.program, self._reward, self.model.readout, 1, self._shape)


@functools.lru_cache(maxsize=16)
def _keep_program(program: Program) -> Callable[..., Prompts]:
    """(prompts, rows, which [B], counts [B]) -> prompts with the chosen rows behind them."""

    def keep(prompts: Prompts, rows: Rows, which: jax.Array, counts: jax.Array) -> Prompts:
        trees, goes_on = jnp.arange(len(which)), counts > 0
        return Prompts(
            cache=keep_suffix(prompts.cache, rows.cache, which, counts),
            last=jnp.where(goes_on, rows.next[trees, which], prompts.last),
            numbers=prompts.numbers,
            seen=jnp.where(goes_on[:, None], rows.seen[trees, which], prompts.seen),
        )

    of_prompts, _ = program_shardings(program)
    sharded: dict[str, Any] = {} if program.mesh is None else {"out_shardings": of_prompts}
    return jax.jit(keep, donate_argnums=(0,), **sharded)


@functools.lru_cache(maxsize=16)
def _keep_reward_program(program: Program) -> Callable[..., PrefixCache]:
    """(prefix, suffix, which [B], counts [B]) -> prefix."""
    sharding = program_shardings(program)[0].cache
    return jax.jit(keep_suffix, donate_argnums=(0,), out_shardings=sharding)


@functools.lru_cache(maxsize=16)
def _reward_program(program: Program, readout: str) -> Callable[..., tuple[jax.Array, SuffixCache]]:
    """(params, prefix, suffix, tokens [B, C, M], ends [B, C], count) -> rewards [B, C] at the ends, and the suffix."""
    config, mesh = program.config, program.mesh
    assert mesh is not None

    def read(
        params: Params,
        prefix: PrefixCache,
        suffix: SuffixCache,
        tokens: jax.Array,
        ends: jax.Array,
        count: jax.Array,
    ) -> tuple[jax.Array, SuffixCache]:
        cut = layers_of(params) if program.copies_layers else None
        shape = ends.shape
        begun = replace(suffix, lengths=jnp.zeros_like(suffix.lengths))

        def step(carry: tuple[jax.Array, SuffixCache, jax.Array]) -> tuple[jax.Array, SuffixCache, jax.Array]:
            number, now, states = carry
            layers = layers_of(params) if cut is None else cut
            ids = lax.dynamic_slice_in_dim(tokens, number, 1, axis=2)
            tried = try_tokens(
                params, layers, ids, now.lengths[..., None], prefix, now,
                config=config, dtype=program.dtype, mesh=mesh,
            )  # fmt: skip
            states = jnp.where((ends == number)[..., None], tried.states[:, :, 0], states)
            return number + 1, take_tried(now, tried, jnp.zeros(shape, jnp.int32)), states

        blank = jnp.zeros((*shape, config.hidden_size), program.dtype)
        _, kept, states = lax.while_loop(lambda carry: carry[0] < count, step, (jnp.int32(0), begun, blank))
        return token_rewards(config, readout, params, states), kept

    behind = program_shardings(program)[1].cache
    return jax.jit(read, donate_argnums=(2,), out_shardings=(replicated(mesh), behind))
