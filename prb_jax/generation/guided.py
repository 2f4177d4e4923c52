"""Guided sampling: every token is chosen by the policy's log-probability plus a weight times a reward model's reward.

A step of ARGS (Khanov et al. 2024): of the C most likely tokens the score is log pi(v | x, y_<t) + w r(x, y_<t v).
Policy and reward model keep their own caches. The C candidates of a step are a tree of one-token responses on the
reward model's caches: one pass tries them all, and the keys and values of the chosen one are kept: it is never read
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, short_repr
from prb_jax.generation.choose import choose
from prb_jax.generation.policy import Policy
from prb_jax.generation.programs import (
    Programs,
    Shape,
    make_program,
    make_programs,
    program_shardings,
    prompt_columns,
)
from prb_jax.generation.prompts import Prompt
from prb_jax.generation.rules import Rules, SampleOptions
from prb_jax.generation.schedule import Drawn, draw
from prb_jax.generation.steps import (
    Program,
    Prompts,
    Rows,
    Stops,
    advance,
    next_logits,
    put_cache,
    repeat_steps,
    row_keys,
)
from prb_jax.generation.token_scores import reward_trees, token_rewards, why_not_token_level
from prb_jax.models.cache import (
    PrefixCache,
    SuffixCache,
    empty_prefix,
    empty_suffix,
    fill_prefix,
    layers_of,
    take_tried,
    try_tokens,
)
from prb_jax.models.decoder import Params
from prb_jax.runs.behaviour import reward_identity
from prb_jax.runs.progress import compiling
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.text.view import ViewOptions
from prb_jax.trees.shapes import round_up
from prb_jax.trees.tree import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuidedPrompts:
    """The prompts of B trees as both models read them."""

    policy: Prompts
    reward: PrefixCache

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuidedRows:
    """B * S rows on their way, with the caches of both models."""

    policy: Rows
    reward: SuffixCache

    __repr__ = short_repr

    @property
    def done(self) -> jax.Array:
        """Bool [B, S]."""
        return self.policy.done


@dataclass(frozen=True, eq=False, kw_only=True)
class Guide:
    """A reward model that guides a policy.

    Attributes:
      model: the reward model.
      weight: w; 0 is the policy alone, whose tokens are then drawn from the whole vocabulary.
      candidates: C, most likely tokens of each step that are tried.
    """

    model: RewardModel
    weight: float
    candidates: int

    def checked(self, policy: Policy) -> Guide:
        """Return the guide, which suits the policy.

        Raises:
          DataError: a number out of range, or a reward model that cannot read this policy's tokens one by one.
        """
        if not np.isfinite(self.weight):
            raise DataError(f"weight: expected a finite number, found {self.weight}")
        tokens = policy.config.vocab_size
        if not 1 <= self.candidates <= tokens:
            raise DataError(
                f"candidates: expected 1 to {tokens}, the policy's tokens, found {self.candidates}"
            )
        if why := why_not_token_level(self.model, policy):
            name = getattr(self.model, "name", type(self.model).__name__)
            raise DataError(f"{name}: cannot guide {policy.name} token by token: {why}")
        return self

    def identity(self) -> dict[str, Any]:
        """Return everything that decides how tokens are guided, JSON-ready."""
        model = reward_identity(self.model.identity())
        return {"reward_model": model, "weight": self.weight, "candidates": self.candidates}

    def draw(
        self,
        policy: Policy,
        comparisons: Sequence[Comparison],
        prompts: Sequence[Prompt],
        options: SampleOptions,
        *,
        rows: int | None = None,
        skip: Callable[[range], bool] = lambda unit: False,
    ) -> Iterator[list[Drawn]]:
        """Draw guided samples, as :meth:`prb_jax.generation.policy.Policy.draw` draws plain ones.

        Args:
          policy: that is guided.
          comparisons: of the prompts, as the reward model is shown them.
          prompts, options, rows, skip: as of the policy.

        Raises:
          DataError: a rule beside the temperature, or a prompt that does not fit into the reward model's context.
        """
        if replace(options.rules, temperature=1.0) != Rules():
            raise DataError(
                "guided tokens are chosen among the candidates: expected no rule beside the temperature"
            )
        if self.weight == 0:
            yield from policy.draw(prompts, options, rows=rows, skip=skip)
            return
        if not prompts:
            return
        view = self.model.reader.view(ViewOptions())
        no_tokens = (np.zeros(1, np.int32),)
        trees = reward_trees(
            self.model, comparisons, [no_tokens] * len(prompts), view=view, room=options.max_new_tokens
        )
        shape = policy.shape(prompts, options, rows)
        programs = _programs(policy, self, shape, trees)
        params = (policy.params, self.model.params, np.float32(self.weight))
        yield from draw(programs, cast(Params, params), policy.task(prompts, options), skip=skip)


def guided_step(
    program: Program,
    reward: Program,
    readout: str,
    candidates: int,
    params: tuple[Params, Params, jax.Array],
    layers: tuple[tuple[Params, ...], tuple[Params, ...]],
    prompts: GuidedPrompts,
    rows: GuidedRows,
    *,
    rules: Rules,
    stops: Stops,
    seed: jax.Array,
) -> GuidedRows:
    """Draw one guided token for every row that is not done.

    Args:
      program, reward: of the policy and of the reward model.
      readout: how the reward model's logits become a reward.
      candidates: C.
      params: of the policy, of the reward model, and the weight.
      layers: of both models.
      prompts, rows: where they stand.
      rules, stops, seed: as of :func:`prb_jax.generation.steps.step`.
    """
    policy_params, judge, weight = params
    logits, cache = next_logits(program, policy_params, layers[0], prompts.policy, rows.policy)
    likely, ids = lax.top_k(logits, candidates)
    places = jnp.broadcast_to(rows.reward.lengths[..., None], ids.shape)
    tried = try_tokens(
        judge,
        layers[1],
        ids,
        places,
        prompts.reward,
        rows.reward,
        config=reward.config,
        dtype=reward.dtype,
        mesh=reward.mesh,
    )
    flat = tried.states.reshape(ids.shape[0], -1, tried.states.shape[-1])
    rewards = token_rewards(reward.config, readout, judge, flat).reshape(ids.shape)
    tree, sample = (jnp.arange(size) for size in ids.shape[:2])
    guided = jnp.full_like(logits, -jnp.inf)
    guided = guided.at[tree[:, None, None], sample[None, :, None], ids].set(likely + weight * rewards)
    chosen = choose(guided, row_keys(seed, prompts.policy, rows.policy), rows.policy.seen, rules)
    alone = jnp.take_along_axis(logits, chosen.token[..., None], axis=-1)[..., 0]
    chosen = replace(chosen, logprob=alone - jax.nn.logsumexp(logits, axis=-1))
    grown = take_tried(rows.reward, tried, jnp.argmax(ids == chosen.token[..., None], axis=-1))
    lengths = jnp.where(rows.done, rows.reward.lengths, grown.lengths)
    return GuidedRows(advance(rows.policy, cache, chosen, stops), replace(grown, lengths=lengths))


def _programs(policy: Policy, guide: Guide, shape: Shape, trees: Sequence[Tree]) -> Programs:
    """The programs of :mod:`prb_jax.generation.programs` for rows of both models."""
    model = guide.model
    reward = make_program(model.decoder, mesh=model.mesh, dtype=jnp.dtype(model.dtype))
    plain = make_programs(policy.program, shape)
    made = reward_programs(policy.program, reward, model.readout, guide.candidates, shape)
    longest = max(len(tree.prefix) for tree in trees)
    columns = round_up(prompt_columns(longest + 1), model.mesh.shape["sequence"])

    def empty() -> tuple[Any, Any]:
        prompts, rows = plain.empty()
        before, behind = made.empty(columns)
        return GuidedPrompts(prompts, before), GuidedRows(rows, behind)

    def read(
        params: Any,
        held: GuidedPrompts,
        tokens: np.ndarray,
        lengths: np.ndarray,
        numbers: np.ndarray,
        places: Any,
    ) -> Any:
        prompts = plain.read(params[0], held.policy, tokens, lengths, numbers, places)
        prefixes = [trees[number].prefix for number in numbers]
        longest = max(map(len, prefixes))
        width = min(round_up(prompt_columns(longest + 1), model.mesh.shape["sequence"]), columns)
        shown = np.zeros((len(prefixes), width), np.int32)
        for row, ids in enumerate(prefixes):
            shown[row, width - len(ids) :] = ids
        sizes = np.asarray([len(ids) for ids in prefixes], np.int32)
        with compiling(made.read, shown.shape):
            return GuidedPrompts(prompts, made.read(params[1], held.reward, shown, sizes, places))

    def restart(rows: GuidedRows, prompts: GuidedPrompts, which: np.ndarray, numbers: np.ndarray) -> Any:
        behind = made.restart(rows.reward, which)
        return GuidedRows(plain.restart(rows.policy, prompts.policy, which, numbers), behind)

    def run(params: Any, prompts: Any, rows: Any, **rest: Any) -> Any:
        with compiling(made.run, rows.policy.tokens.shape, prompts.policy.cache.columns):
            return made.run(params, prompts, rows, **rest)

    def end(rows: GuidedRows, which: np.ndarray) -> Any:
        return GuidedRows(plain.end(rows.policy, which), rows.reward)

    return Programs(
        shape=shape,
        empty=empty,
        read=read,
        restart=restart,
        run=run,
        end=cast(Any, end),
        of_policy=lambda rows: cast(GuidedRows, rows).policy,
    )


@dataclass(frozen=True)
class RewardPrograms:
    """The compiled programs of a reward model's caches, and the loop over both models."""

    empty: Callable[[int], Any]
    read: Callable[..., PrefixCache]
    restart: Callable[..., SuffixCache]
    run: Callable[..., GuidedRows]


@functools.lru_cache(maxsize=16)
def reward_programs(
    program: Program, reward: Program, readout: str, candidates: int, shape: Shape
) -> RewardPrograms:
    """Return the compiled programs of a reward model beside a policy; the same ones for equal arguments.

    Args:
      program, reward: of the two models.
      readout: how the reward model's logits become a reward.
      candidates: C.
      shape: of the policy's rows.
    """
    rows = program_shardings(program)[1]
    own_prompts, own_rows = program_shardings(reward)
    before, behind = own_prompts.cache, own_rows.cache
    options: dict[str, Any] = {"config": reward.config, "dtype": reward.dtype}

    def empty(columns: int) -> tuple[PrefixCache, SuffixCache]:
        return (
            empty_prefix(reward.config, trees=shape.trees, columns=columns, dtype=reward.dtype),
            empty_suffix(
                reward.config,
                trees=shape.trees,
                samples=shape.samples,
                columns=shape.columns,
                dtype=reward.dtype,
            ),
        )

    def read(params: Params, held: PrefixCache, tokens: Any, lengths: Any, places: Any) -> PrefixCache:
        new = fill_prefix(
            params,
            tokens,
            lengths,
            **options,
            attention=reward.attention,
            mesh=reward.mesh,
            filler=reward.filler,
        )
        return put_cache(held, new, places)

    def restart(cache: SuffixCache, which: jax.Array) -> SuffixCache:
        return replace(cache, lengths=jnp.where(which, 0, cache.lengths))

    def run(
        params: tuple[Params, Params, jax.Array],
        prompts: GuidedPrompts,
        rows: GuidedRows,
        *,
        rules: Rules,
        stops: Stops,
        seed: jax.Array,
        most: jax.Array,
        watched: jax.Array,
    ) -> GuidedRows:
        cut = (layers_of(params[0]), layers_of(params[1])) if program.copies_layers else None

        def body(now: GuidedRows) -> GuidedRows:
            layers = (layers_of(params[0]), layers_of(params[1])) if cut is None else cut
            return guided_step(
                program, reward, readout, candidates, params, layers, prompts, now,
                rules=rules, stops=stops, seed=seed,
            )  # fmt: skip

        return repeat_steps(body, rows, most=most, watched=watched)

    return RewardPrograms(
        empty=jax.jit(empty, static_argnums=(0,), out_shardings=(before, behind)),
        read=jax.jit(read, donate_argnums=(1,), out_shardings=before),
        restart=jax.jit(restart, donate_argnums=(0,), out_shardings=behind),
        run=jax.jit(run, donate_argnums=(2,), out_shardings=GuidedRows(rows, behind)),
    )
