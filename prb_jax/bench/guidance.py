"""`prb bench guide`: what a guided token costs, beside a token of the policy alone and of the reward model alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.bench.sampling import silent_policy
from prb_jax.bench.scorer import bench_source
from prb_jax.bench.table import shown
from prb_jax.checkpoints.load import abstract_params
from prb_jax.generation.guided import GuidedPrompts, GuidedRows, reward_programs
from prb_jax.generation.programs import Shape, make_program, make_programs, prompt_columns
from prb_jax.generation.rules import Rules
from prb_jax.generation.schedule import as_rules
from prb_jax.generation.steps import Program, Stops
from prb_jax.generation.token_scores import token_rewards
from prb_jax.models.cache import PrefixCache, SuffixCache, layers_of, take_tried, try_tokens
from prb_jax.models.decoder import Params
from prb_jax.models.head import LINEAR
from prb_jax.models.random_params import init_params
from prb_jax.sharding import mesh_shape, parameter_shardings
from prb_jax.trees.shapes import round_up

READOUT = "logit"


@dataclass(frozen=True, kw_only=True)
class GuidanceResult:
    """Milliseconds of a token of every text, medians over rounds; prompts are read before."""

    dtype: str = field(metadata=shown("dtype", meaning="of both models"))
    prompts: int = field(metadata=shown("texts"))
    prompt_tokens: int = field(metadata=shown("prompt tokens", "{v:,}"))
    new_tokens: int
    candidates: int = field(metadata=shown("candidates"))
    policy_ms: float = field(metadata=shown("policy ms/token", "{v:.2f}", "of the policy alone"))
    reward_ms: float = field(
        metadata=shown("reward model ms/token", "{v:.2f}", "of the reward model that reads one token a text")
    )
    guided_ms: float = field(metadata=shown("guided ms/token", "{v:.2f}", "with both models"))
    ratio: float = field(
        metadata=shown("guided / (policy + reward model)", "{v:.2f}", "median of the rounds' ratios")
    )


def bench_guidance(
    model: str,
    *,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    candidates: int,
    rounds: int,
    mesh: str | None,
    dtype: str | None,
    attention: str = "auto",
) -> GuidanceResult:
    """Time the loops over tokens of the policy, of the reward model and of both, in turn.

    The arguments are the options of `prb bench guide`, whose help explains them.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
    """
    policy = silent_policy(bench_source(model), mesh=mesh, dtype=dtype, attention=attention)
    kind, devices = jnp.dtype(policy.dtype), policy.mesh
    config = replace(policy.config, head=LINEAR, num_labels=1)
    reward = make_program(config, mesh=devices, dtype=kind, attention=attention)
    shardings = parameter_shardings(abstract_params(config), devices)
    judge: Params = jax.jit(lambda: init_params(config, dtype=kind), out_shardings=shardings)()
    parts = mesh_shape(devices).batch_shards
    trees, columns = (
        round_up(prompts, parts),
        round_up(prompt_columns(prompt_tokens + 1), devices.shape["sequence"]),
    )
    shape = Shape(
        trees=trees, samples=1, prompt_columns=columns, columns=round_up(new_tokens, 16), parts=parts
    )
    plain = make_programs(policy.program, shape)
    both = reward_programs(policy.program, reward, READOUT, min(candidates, config.vocab_size), shape)
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (trees, columns + 1)).astype(np.int32)
    numbers = np.arange(trees, dtype=np.int32)
    lengths = np.full(trees, prompt_tokens + 1, np.int32)
    held, _ = plain.empty()
    held = plain.read(policy.params, held, tokens, lengths, numbers, numbers)
    before, _ = both.empty(columns)
    before = both.read(judge, before, tokens[:, :-1], lengths - 1, numbers)
    drawing: dict[str, Any] = {
        "rules": as_rules(Rules(temperature=0.0)),
        "stops": Stops(ids=np.asarray([-1], np.int32), tokens=np.int32(new_tokens)),  # pyright: ignore[reportArgumentType]
        "seed": np.int32(0),
        "most": np.int32(new_tokens),
        "watched": np.zeros((trees, 1), bool),
    }
    every, weight = np.ones((trees, 1), bool), np.float32(1.0)
    read_alone = _reward_loop(reward, new_tokens)

    def of_policy() -> Callable[[], Any]:
        rows = plain.restart(plain.empty()[1], held, every, np.zeros((trees, 1), np.int32))
        return lambda: plain.run(policy.params, held, rows, **drawing).tokens

    def of_reward() -> Callable[[], Any]:
        behind = both.empty(columns)[1]
        return lambda: read_alone(judge, before, behind)

    def of_both() -> Callable[[], Any]:
        rows = plain.restart(plain.empty()[1], held, every, np.zeros((trees, 1), np.int32))
        pair = GuidedRows(rows, both.empty(columns)[1])
        prompts = GuidedPrompts(held, before)
        return lambda: both.run((policy.params, judge, weight), prompts, pair, **drawing).policy.tokens

    times: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        found = tuple(_seconds(make()) for make in (of_policy, of_reward, of_both))
        if number:  # the first round compiles
            times.append(found)
    alone, judged, guided = (1000 * statistics.median(each) / new_tokens for each in zip(*times, strict=True))
    return GuidanceResult(
        dtype=policy.dtype,
        prompts=trees,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        candidates=candidates,
        policy_ms=alone,
        reward_ms=judged,
        guided_ms=guided,
        ratio=statistics.median(three / (one + two) for one, two, three in times),
    )


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _reward_loop(reward: Program, count: int) -> Callable[[Params, PrefixCache, SuffixCache], jax.Array]:
    """A jitted loop in which the reward model reads a token of each text, and gives its reward."""

    def loop(params: Params, prefix: PrefixCache, suffix: SuffixCache) -> jax.Array:
        cut = layers_of(params) if reward.copies_layers else None

        def body(_: jax.Array, carry: tuple[SuffixCache, jax.Array]) -> tuple[SuffixCache, jax.Array]:
            now, total = carry
            layers = layers_of(params) if cut is None else cut
            ids = jnp.ones((*now.lengths.shape, 1), jnp.int32)
            tried = try_tokens(
                params, layers, ids, now.lengths[..., None], prefix, now,
                config=reward.config, dtype=reward.dtype, mesh=reward.mesh,
            )  # fmt: skip
            flat = tried.states.reshape(ids.shape[0], -1, tried.states.shape[-1])
            rewards = token_rewards(reward.config, READOUT, params, flat).reshape(ids.shape)
            return take_tried(now, tried, jnp.zeros_like(now.lengths)), total + rewards[..., 0]

        start = suffix, jnp.zeros(suffix.lengths.shape, jnp.float32)
        return lax.fori_loop(0, count, body, start)[1]

    return jax.jit(loop)
