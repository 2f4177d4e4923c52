"""`prb bench sample`: speed of a policy that draws texts, compared with `generate` of transformers. `prb bench guide`:
cost of a guided token, compared with a token of the policy and of the reward model separately."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.behaviour.generation.programs import (
    GuidedTask,
    Task,
    choose_shape,
    make_cache_programs,
    make_program,
    make_programs,
)
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.steps import Guidance, Program, token_rewards
from prb_jax.errors import DataError
from prb_jax.measure.bench.figures import Figures, in_turn, median_ratio, timed
from prb_jax.measure.bench.models import bench_source, silent_policy
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.workload import synthetic_workload
from prb_jax.models.cache import PrefixCache, SuffixCache, take_tried, try_tokens
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.decoder import Params
from prb_jax.models.head import LINEAR
from prb_jax.models.model import init_params, parameter_shardings
from prb_jax.platform.sharding import mesh_shape
from prb_jax.trees.tree import round_up

READOUT = "logit"


def bench_sampling(options: BenchOptions) -> Figures:
    """Time passes of ours and, on request, of transformers, alternating; every sample has ``new_tokens`` tokens.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: several greedy samples, or more tokens than the context.
      RunError: torch is not installed.
    """
    prompts, samples, new = options.prompts, options.samples, options.new_tokens
    source = bench_source(options.model)
    policy = silent_policy(source, options)
    if 2 * new >= policy.context:
        raise DataError(
            f"new tokens: expected less than half of the context of {policy.context}, found {new}"
        )
    work = synthetic_workload(
        prompts,
        responses=1,
        prefix_tokens=options.prompt_tokens,
        response_tokens=2,
        vocab_size=policy.config.vocab_size,
        longest=policy.context - new,
    )
    given = [np.asarray(tree.prefix) for tree in work.trees]
    drawing: dict[str, Any] = {"temperature": options.temperature}

    def ours() -> tuple[float, list[np.ndarray]]:
        seconds, drawn = timed(
            lambda: policy.sample(given, n=samples, max_new_tokens=new, stop_ids=[], **drawing)
        )
        return seconds, [sample.token_ids for row in drawn for sample in row]

    runs: list[Callable[[], Any]] = [ours]
    count, same = None, False
    if options.against:
        from prb_jax.measure.bench.rivals.transformers import TransformersSampler

        config = policy.config.original | {"tie_word_embeddings": True}
        rival = TransformersSampler(source if isinstance(source, Path) else config, dtype=policy.dtype)
        rival.run(given[:1], samples=samples, tokens=1, **drawing)
        same = rival.same_weights and options.temperature == 0
        count = min(prompts, options.against_prompts or prompts)
        runs.append(lambda: rival.run(given[:count], samples=samples, tokens=new, **drawing))
    first, drawn = ours()
    passes, *others = in_turn(options.rounds, *runs)
    seconds = statistics.median(seconds_of_pass for seconds_of_pass, _ in passes)
    tokens = prompts * samples * new
    rate = speed = equal = None
    for theirs in others:
        rates = [run.tokens / run.seconds for run in theirs]
        rate = statistics.median(rates)
        speed = median_ratio([tokens / seconds_of_pass for seconds_of_pass, _ in passes], rates)
        equal = _equal(drawn, np.concatenate(theirs[0].ids)) if same else None
    figures = Figures()
    add = figures.add
    add("dtype", policy.dtype, "dtype")
    add("prompts", prompts, "prompts x samples", f"{prompts} x {samples}")
    add("samples", samples)
    add("new_tokens", new, "new tokens", "{:,}")
    size = sum(map(len, given))
    add("prompt_tokens", size, "prompt tokens", f"{size / prompts:,.0f}")
    add("tokens_per_second", tokens / seconds, "tokens/s", "{:,.1f}")  # includes reading the prompts
    add("compile_seconds", max(0.0, first - seconds), "compile s", "{:.1f}")
    add("against_prompts", count)
    add("against_tokens_per_second", rate, "transformers tokens/s", "{:,.1f}")
    add("speedup", speed, "speed-up", "{:.2f}x")
    add("equal_tokens", equal, "equal tokens", "{:.1%}")  # share of greedy texts before the first difference
    return figures


def _equal(ours: Sequence[np.ndarray], theirs: np.ndarray) -> float:
    same = []
    for our_ids, their_ids in zip(ours, theirs):
        different = np.flatnonzero(our_ids != their_ids)
        same.append(different[0] if len(different) else len(our_ids))
    return float(np.sum(same) / (len(same) * theirs.shape[1]))


def bench_guidance(options: BenchOptions) -> Figures:
    """Time the token loops of the policy, of the reward model and of both, alternating; prompts are read before.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
    """
    policy, new = silent_policy(bench_source(options.model), options), options.new_tokens
    kind, mesh = jnp.dtype(policy.dtype), policy.mesh
    config = replace(policy.config, head=LINEAR, num_labels=1)
    reward = make_program(config, mesh=mesh, dtype=kind, attention=options.attention)
    shardings = parameter_shardings(abstract_params(config), mesh, config=config)
    judge: Params = jax.jit(lambda: init_params(config, dtype=kind), out_shardings=shardings)()
    trees = round_up(options.prompts, mesh_shape(mesh).batch_shards)
    drawing = SampleOptions(temperature=0.0, max_new_tokens=new)
    shape = choose_shape(
        policy.program, drawing, longest=options.prompt_tokens + 1, prompts=trees, rows=trees
    )
    guidance = Guidance(reward=reward, readout=READOUT, candidates=min(options.candidates, config.vocab_size))
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (trees, options.prompt_tokens + 1))
    ids = list(tokens.astype(np.int32))
    guided_task = GuidedTask(judge, 1.0, [prompt[:-1] for prompt in ids])
    places = {number: number for number in range(trees)}
    every, numbers = np.ones((trees, 1), bool), np.zeros((trees, 1), np.int32)

    def loop(guided: GuidedTask | None) -> Callable[[], float]:
        programs = make_programs(policy.program, shape, None if guided is None else guidance)
        task = Task(prompts=ids, options=drawing, stop_ids=(), guided=guided)
        held = programs.reader(policy.params, task, places).fill(programs.empty(task)[0], places)

        def run() -> float:
            rows = programs.restart(programs.empty(task)[1], held, every, numbers)
            return _seconds(
                lambda: programs.run(policy.params, held, rows, task, most=new, watched=~every).tokens
            )

        return run

    of_policy, of_both = loop(None), loop(guided_task)
    read_alone, caches = _reward_loop(reward, new), make_cache_programs(reward, shape)
    before, _ = caches.empty(options.prompt_tokens)
    sizes = {"longest": options.prompt_tokens}
    tokens = caches.length(guided_task.prompts, **sizes)
    reader = caches.reader(judge, dict(enumerate(guided_task.prompts)), tokens=tokens, **sizes)
    before = reader.fill(before, places)

    def of_reward() -> float:
        behind = caches.empty(options.prompt_tokens)[1]
        return _seconds(lambda: read_alone(judge, before, behind))

    in_turn(1, of_policy, of_reward, of_both)  # compile all
    times = in_turn(options.rounds, of_policy, of_reward, of_both)
    alone, judged, guided = (1000 * statistics.median(seconds) / new for seconds in times)
    ratio = median_ratio(times[2], [one + two for one, two in zip(times[0], times[1], strict=True)])
    figures = Figures()
    add = figures.add
    add("dtype", policy.dtype, "dtype")
    add("prompts", trees, "texts")
    add("prompt_tokens", options.prompt_tokens, "prompt tokens", "{:,}")
    add("new_tokens", new)
    add("candidates", options.candidates, "candidates")
    add("policy_ms", alone, "policy ms/token", "{:.2f}")
    add("reward_ms", judged, "reward model ms/token", "{:.2f}")  # reads one token per text
    add("guided_ms", guided, "guided ms/token", "{:.2f}")
    add("ratio", ratio, "guided / (policy + reward model)", "{:.2f}")
    return figures


def _seconds(run: Callable[[], Any]) -> float:
    return timed(lambda: jax.block_until_ready(run()))[0]


def _reward_loop(reward: Program, count: int) -> Callable[[Params, PrefixCache, SuffixCache], jax.Array]:
    """Return a jitted loop in which the reward model reads one token of each text, and returns its reward."""

    def loop(params: Params, prefix: PrefixCache, suffix: SuffixCache) -> jax.Array:
        layers = reward.layers(params)

        def body(_: jax.Array, carry: tuple[SuffixCache, jax.Array]) -> tuple[SuffixCache, jax.Array]:
            now, total = carry
            ids = jnp.ones((*now.lengths.shape, 1), jnp.int32)
            tried = try_tokens(params, layers(), ids, now.lengths[..., None], prefix, now, **reward.settings)
            rewards = token_rewards(reward.config, READOUT, params, tried.states)
            return take_tried(now, tried, jnp.zeros_like(now.lengths)), total + rewards[..., 0]

        start = suffix, jnp.zeros(suffix.lengths.shape, jnp.float32)
        return lax.fori_loop(0, count, body, start)[1]

    return jax.jit(loop)
