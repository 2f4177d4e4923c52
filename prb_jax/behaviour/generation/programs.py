"""The compiled programs of a policy for one shape of rows, and the task they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from prb_jax.behaviour.generation import steps
from prb_jax.behaviour.generation.reading import (
    PromptPacker,
    PromptReader,
    Reader,
    new_prompts,
    prompt_length,
)
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.steps import Guidance, Program, Prompts, Rows, Stops
from prb_jax.errors import MeshError, short_repr
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.cache import (
    Moves,
    PrefixCache,
    StreamCache,
    SuffixCache,
    empty_prefix,
    empty_suffix,
    put_prefixes,
)
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.family import ATTENTION, RECURRENT
from prb_jax.models.decoder import Params
from prb_jax.models.model import narrow_matrices, parameter_shardings
from prb_jax.platform.meshes import meet
from prb_jax.platform.sharding import MESH_AXES, check_heads, mesh_shape, partition_spec
from prb_jax.runs.progress import compiling
from prb_jax.trees.in_order import length_step
from prb_jax.trees.tree import round_up

TREES_OF_A_UNIT = 8
"""How often the trees of a batch are refilled within a unit: often, so few rows idle at its end."""

ROWS = {"cpu": 16, "gpu": 256, "tpu": 256}
"""Default rows for each device that holds a part of the rows or of their heads."""


def decoding_mesh(config: DecoderConfig, mesh: Mesh) -> Mesh:
    """Return the mesh on which texts are drawn, over the same devices in the same order.

    Parameters split over ``fsdp`` or ``sequence`` would be gathered whole on every device before the loop over tokens.
    Here as many devices as divide the model split heads and widths instead (``tensor``); the remaining factor holds
    copies (``data``). A model whose heads cannot be split keeps its mesh.
    """
    shape = mesh_shape(mesh)
    if shape.fsdp * shape.sequence == 1:
        return mesh
    together = shape.devices // shape.data
    abstract = abstract_params(config)
    for tensor in range(together, 1, -1):
        if together % tensor:
            continue
        sizes = (shape.devices // tensor, 1, 1, tensor)
        split = Mesh(mesh.devices.reshape(sizes), MESH_AXES, axis_types=mesh.axis_types)
        try:
            check_heads(split, heads=config.head_counts)
            parameter_shardings(abstract, split, config=config)
        except MeshError:
            continue
        return meet(split)
    return mesh


def placing_program(program: Program, params: Any) -> Any:
    """Return the jitted function that moves parameters to the program's sharding, with matrices in its dtype.

    ``params`` are arrays or shapes with a different sharding over the same devices in the same order.
    """
    mesh, split = program.mesh, jax.tree.leaves(params)[0].sharding.mesh
    sizes = (split.shape["data"], mesh.shape["data"] // split.shape["data"], 1, mesh.shape["tensor"])
    # Two steps: first an all-to-all moves the split to the other axis of each matrix, within devices that share a copy;
    # then the parts of a copy are gathered. In a single step XLA would gather whole matrices.
    halfway = parameter_shardings(
        params,
        Mesh(mesh.devices.reshape(sizes), MESH_AXES, axis_types=mesh.axis_types),
        config=program.config,
    )

    def place(params: Params) -> Params:
        params = jax.lax.with_sharding_constraint(params, halfway)
        matrices = {
            name: params[name].astype(program.dtype) for name in ("embed", "lm_head") if name in params
        }
        layers = narrow_matrices(params["layers"], program.config, program.dtype)
        return {**params, **matrices, "layers": layers}

    return jax.jit(place, out_shardings=parameter_shardings(params, mesh, config=program.config))


def make_program(
    config: DecoderConfig, *, mesh: Mesh, dtype: jnp.dtype, attention: str = "auto", lora_scale: float = 1.0
) -> Program:
    """Return the static settings of a model that runs token by token; see :class:`Program`.

    ``attention`` is one of :data:`prb_jax.models.ATTENTIONS`.

    Raises:
      CheckpointError: the attention does not exist.
    """
    choose_attention(mesh, dtype, attention, config=config)  # raises or warns before any weights are read
    copies = mesh.devices.flat[0].platform == "cpu"
    return Program(
        config=config,
        dtype=dtype,
        mesh=mesh,
        attention=attention,
        lora_scale=lora_scale,
        copies_layers=copies,
    )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The static sizes of a sampler."""

    # trees, samples: B and S: rows are B * S
    trees: int
    samples: int
    prompt_columns: int  # P, for all tokens of a prompt except the last
    columns: int  # M, tokens of a sample
    parts: int = 1  # number of parts into which the mesh splits the trees

    @property
    def unit(self) -> int:
        """Number of prompts in a unit; see :mod:`prb_jax.behaviour.generation.schedule`."""
        return self.trees * TREES_OF_A_UNIT


def prompt_columns(length: int) -> int:
    """Return the columns for a prompt of ``length`` tokens without its last one: four sizes in each doubling."""
    return length_step(max(length - 1, 16), 16)


def choose_shape(
    program: Program, options: SampleOptions, *, longest: int, prompts: int, rows: int | None = None
) -> Shape:
    """Return the sizes for this number of prompts of at most ``longest`` tokens.

    B * S is about ``rows``, by default chosen for the machine.
    """
    mesh = program.mesh
    platform, parts = mesh.devices.flat[0].platform, mesh_shape(mesh).batch_shards
    # A device with fewer heads of a row has room for more rows.
    by_machine = parts * mesh.shape["tensor"] * ROWS.get(platform, 16)
    wanted = max(1, (rows or by_machine) // parts)  # in each part
    together = min(options.n, wanted)
    return Shape(
        trees=parts * min(max(1, wanted // together), -(-prompts // parts)),
        samples=together,
        prompt_columns=round_up(prompt_columns(longest), mesh.shape["sequence"]),
        columns=round_up(options.max_new_tokens, 16),
        parts=parts,
    )


Cut = Callable[[np.ndarray], int | None]
"""Maps the tokens of a sample so far to how many to keep if a stop text occurs in them, else None."""


@dataclass(frozen=True, eq=False)
class GuidedTask:
    """Inputs of a guiding reward model."""

    params: Params  # parameters of the reward model
    weight: float  # w, weight of the rewards
    prompts: Sequence[np.ndarray]  # token ids of each prompt as the reward model reads it
    stream: int | None = None  # same as in :class:`Task`

    __repr__ = short_repr


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """Everything that determines the samples of some prompts."""

    prompts: Sequence[np.ndarray]  # token ids of each prompt, at least one
    options: SampleOptions  # how samples are drawn
    stop_ids: tuple[int, ...]  # tokens after which a sample ends
    cut: Cut | None = None  # ends samples at a stop text; None without stop texts
    numbers: Sequence[int] | None = None  # prompt numbers for random keys; default: positions
    guided: GuidedTask | None = None  # reward model inputs, if a reward model guides the tokens
    # tokens of the streams that read prompts; by default chosen for these prompts
    stream: int | None = None

    __repr__ = short_repr


class Programs:
    """The compiled functions of a sampler. Get them from :func:`make_programs`.

    Attributes:
      shape: static sizes.
      restart: see :func:`prb_jax.behaviour.generation.steps.restart`.
      end: see :func:`prb_jax.behaviour.generation.steps.ended`.
    """

    def __init__(self, program: Program, shape: Shape, guidance: Guidance | None = None) -> None:
        self.shape = shape
        of_prompts, of_rows = program_shardings(program, guidance)

        def make() -> tuple[Prompts, Rows]:
            return (
                steps.empty_prompts(program, trees=shape.trees, columns=shape.prompt_columns),
                steps.empty_rows(program, trees=shape.trees, samples=shape.samples, columns=shape.columns),
            )

        self._program = program
        self._make = jax.jit(make, out_shardings=program_shardings(program))
        self._put = jax.jit(steps.put_prompts, donate_argnums=(0,), out_shardings=of_prompts)
        self._run = run_program(program, guidance)
        self._of_reward = None if guidance is None else make_cache_programs(guidance.reward, shape)
        self.restart = jax.jit(steps.restart, donate_argnums=(0,), out_shardings=of_rows)
        self.end = jax.jit(steps.ended, donate_argnums=(0,), out_shardings=of_rows)

    def empty(self, task: Task) -> tuple[Prompts, Rows]:
        """Return empty prompts and rows."""
        prompts, rows = self._make()
        if task.guided is None or self._of_reward is None:
            return prompts, rows
        before, behind = self._of_reward.empty(max(map(len, task.guided.prompts)))
        return replace(prompts, reward=before), replace(rows, reward=behind)

    def planned(self, task: Task) -> Task:
        """Return the task with the token counts of the streams that read its prompts, if not given."""
        shape, guided = self.shape, task.guided
        if task.stream is None:
            cached = [ids[:-1] for ids in task.prompts]
            sizes = {"together": shape.unit, "columns": shape.prompt_columns}
            task = replace(task, stream=prompt_length(self._program, cached, **sizes))
        if guided is not None and guided.stream is None and self._of_reward is not None:
            longest = max(map(len, guided.prompts))
            guided = replace(guided, stream=self._of_reward.length(guided.prompts, longest=longest))
        return replace(task, guided=guided)

    def reader(self, params: Params, task: Task, unit: Iterable[int]) -> Reader:
        """Return the reader for these prompts of a task, given by number."""
        task, numbers = self.planned(task), list(unit)
        keys, guided = task.numbers or range(len(task.prompts)), task.guided

        def put(held: Prompts, streams: StreamCache, moves: Moves, moved: np.ndarray) -> Prompts:
            new = new_prompts(moves, moved, task.prompts, keys)
            with compiling(self._put, new.tokens.shape, streams.keys.shape):
                return self._put(held, streams, new)

        packer = PromptPacker(
            self._program,
            {number: task.prompts[number][:-1] for number in numbers},
            tokens=task.stream or 0,
            columns=self.shape.prompt_columns,
            trees=self.shape.trees,
        )
        of_policy = PromptReader(self._program, params, packer, put=put)
        if guided is None or self._of_reward is None:
            return Reader(of_policy)
        shown = {number: guided.prompts[number] for number in numbers}
        longest, tokens = max(map(len, guided.prompts)), guided.stream or 0
        of_reward = self._of_reward.reader(guided.params, shown, longest=longest, tokens=tokens)
        return Reader(of_policy, of_reward)

    def run(
        self, params: Params, prompts: Prompts, rows: Rows, task: Task, *, most: int, watched: np.ndarray
    ) -> Rows:
        """Draw up to ``most`` tokens a row; see :func:`prb_jax.behaviour.generation.steps.run_steps`."""
        options, guided = task.options, task.guided
        stops = Stops(
            ids=np.asarray(task.stop_ids or (-1,), np.int32),  # pyright: ignore[reportArgumentType]
            tokens=np.int32(options.max_new_tokens),  # pyright: ignore[reportArgumentType]
        )
        with compiling(self._run, rows.tokens.shape, prompts.cache.columns):
            return self._run(
                params,
                prompts,
                rows,
                rules=options.rules,
                stops=stops,
                seed=np.int32(options.seed),
                most=np.int32(most),
                watched=watched,
                reward=None if guided is None else (guided.params, np.float32(guided.weight)),
            )


make_programs = functools.lru_cache(maxsize=16)(Programs)
"""Return the compiled programs for a program, a shape and a guidance; cached, so equal arguments share them."""


class CachePrograms:
    """The compiled functions of a reward model's caches. Get them from :func:`make_cache_programs`."""

    def __init__(self, reward: Program, shape: Shape) -> None:
        self._reward, self._shape = reward, shape
        of_prompts, of_rows = program_shardings(reward)

        def make(columns: int) -> tuple[PrefixCache, SuffixCache]:
            config, dtype, trees = reward.config, reward.dtype, shape.trees
            return (
                empty_prefix(config, trees=trees, columns=columns, dtype=dtype),
                empty_suffix(config, trees=trees, samples=shape.samples, columns=shape.columns, dtype=dtype),
            )

        self._make = jax.jit(make, static_argnums=(0,), out_shardings=(of_prompts.cache, of_rows.cache))
        self._put = jax.jit(put_prefixes, donate_argnums=(0,), out_shardings=of_prompts.cache)

    def empty(self, longest: int) -> tuple[PrefixCache, SuffixCache]:
        """Return empty caches, with room for prompts of ``longest`` tokens."""
        return self._make(self._columns(longest))

    def length(self, prompts: Sequence[np.ndarray], *, longest: int) -> int:
        """Return the token count of the streams for these prompts, of at most ``longest`` tokens each."""
        columns = self._columns(longest)
        return prompt_length(self._reward, prompts, together=self._shape.unit, columns=columns)

    def reader(
        self, params: Params, prompts: Mapping[int, np.ndarray], *, longest: int, tokens: int
    ) -> PromptReader[PrefixCache]:
        """Return the reader of prompts for caches of :meth:`empty`, with streams of ``tokens`` tokens."""

        def put(held: PrefixCache, streams: StreamCache, moves: Moves, moved: np.ndarray) -> PrefixCache:
            with compiling(self._put, np.shape(moves.places), streams.keys.shape):
                return self._put(held, streams, moves)

        sizes = {"tokens": tokens, "columns": self._columns(longest), "trees": self._shape.trees}
        return PromptReader(self._reward, params, PromptPacker(self._reward, prompts, **sizes), put=put)

    def _columns(self, longest: int) -> int:
        return round_up(prompt_columns(longest + 1), self._reward.mesh.shape["sequence"])


make_cache_programs = functools.lru_cache(maxsize=16)(CachePrograms)
"""Return the compiled programs of a reward model for a shape; cached, so equal arguments share them."""


def run_program(program: Program, guidance: Guidance | None = None) -> Any:
    """Return the jitted :func:`prb_jax.behaviour.generation.steps.run_steps` of a policy; it donates the rows."""
    run = functools.partial(steps.run_steps, program, guidance=guidance)
    return jax.jit(run, donate_argnums=(2,), out_shardings=program_shardings(program, guidance)[1])


def program_shardings(program: Program, guidance: Guidance | None = None) -> tuple[Any, Any]:
    """Return the shardings of prompts and rows over the mesh."""
    batch: Any = NamedSharding(program.mesh, partition_spec(("batch",)))

    def caches(of: Program) -> tuple[PrefixCache, SuffixCache]:
        mixers, mesh = of.config.layer_mixers, of.mesh
        layers, states = mixers.count(ATTENTION), mixers.count(RECURRENT)
        prefix: Any = (NamedSharding(mesh, partition_spec(("batch", "heads", "tokens"))),) * layers
        suffix: Any = NamedSharding(mesh, partition_spec(("batch", None, "heads")))
        state: Any = (NamedSharding(mesh, partition_spec(("batch", "heads"))),) * states
        return (
            PrefixCache(prefix, prefix, batch, state),
            SuffixCache((suffix,) * layers, (suffix,) * layers, batch, (suffix,) * states),
        )

    of_policy, of_reward = caches(program), (None, None) if guidance is None else caches(guidance.reward)
    names = ("next", "numbers", "seen", "done", "tokens", "logprobs", "sampled_logprobs")
    of_rows: dict[str, Any] = dict.fromkeys(names, batch)
    return (
        Prompts(cache=of_policy[0], last=batch, numbers=batch, seen=batch, reward=of_reward[0]),
        Rows(cache=of_policy[1], **of_rows, reward=of_reward[1]),
    )
