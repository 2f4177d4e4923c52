"""The compiled programs of a policy for one shape of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from prb_jax.checkpoints.load import abstract_params
from prb_jax.errors import MeshError
from prb_jax.generation import steps
from prb_jax.generation.rules import Rules
from prb_jax.generation.steps import Program, Prompts, Rows, Stops
from prb_jax.models.attention.choice import wanted_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.runs.progress import compiling
from prb_jax.sharding import (
    MESH_AXES,
    check_heads,
    mesh_shape,
    parameter_shardings,
    partition_spec,
    replicated,
)
from prb_jax.trees.shapes import round_up

ROWS = {"cpu": 16, "gpu": 256, "tpu": 256}
"""Rows for each device that has a part of the rows or of their heads, where it is not said."""

READ_TOKENS = {"cpu": 512, "gpu": 16_384, "tpu": 16_384}
"""Padded tokens of prompts that are read at a time, for each part; a single prompt may have more."""

FILLER = {"cpu": 1, "gpu": 16, "tpu": 128}


def decoding_mesh(config: DecoderConfig, mesh: Mesh) -> Mesh:
    """Return the mesh on which texts are drawn, over the same devices in the same order.

    Parameters that are split over ``fsdp`` or ``sequence`` would be gathered whole on every device before the loop
    over tokens. These devices split heads and widths instead (``tensor``), as many of them as divide the model; where
    not all do, the rest have copies (``data``). A model whose heads cannot be split keeps its mesh.
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
            check_heads(split, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
            parameter_shardings(abstract, split)
        except MeshError:
            continue
        return split
    return mesh


def placing_program(program: Program, params: Any) -> Any:
    """Return the jitted function that puts parameters where the program draws, matrices in its dtype.

    Args:
      program: of the policy, with a mesh.
      params: arrays or their shapes, split in another way over the same devices in the same order.
    """
    mesh = program.mesh
    assert mesh is not None
    split = jax.tree.leaves(params)[0].sharding.mesh
    sizes = (split.shape["data"], mesh.shape["data"] // split.shape["data"], 1, mesh.shape["tensor"])
    # First the split goes over from one axis of each matrix to the other, within the devices that share a copy then
    # (an all-to-all), and only then are the parts of a copy gathered: in one step XLA would gather whole matrices.
    halfway = parameter_shardings(
        params, Mesh(mesh.devices.reshape(sizes), MESH_AXES, axis_types=mesh.axis_types)
    )

    def place(params: Params) -> Params:
        params = jax.lax.with_sharding_constraint(params, halfway)
        matrices = {
            name: params[name].astype(program.dtype) for name in ("embed", "lm_head") if name in params
        }
        layers = {
            name: leaf.astype(program.dtype) if leaf.ndim == 3 and leaf.dtype == jnp.float32 else leaf
            for name, leaf in params["layers"].items()
        }
        return {**params, **matrices, "layers": layers}

    return jax.jit(place, out_shardings=parameter_shardings(params, mesh))


def make_program(
    config: DecoderConfig, *, mesh: Mesh, dtype: jnp.dtype, attention: str = "auto", lora_scale: float = 1.0
) -> Program:
    """Return what the programs of a policy have in common.

    Args:
      config: architecture, with a head of the whole vocabulary.
      mesh: devices.
      dtype: of activations and caches.
      attention: that reads prompts, one of :data:`prb_jax.models.ATTENTIONS`.
      lora_scale: of adapters among the parameters.

    Raises:
      CheckpointError, MeshError: these devices or this dtype have no such attention.
    """
    platform = mesh.devices.flat[0].platform
    return Program(
        config=config,
        dtype=dtype,
        mesh=mesh,
        attention=wanted_attention(mesh, dtype, attention),
        lora_scale=lora_scale,
        filler=max(FILLER.get(platform, 1), mesh.shape["sequence"]),
        copies_layers=platform == "cpu",
    )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The static sizes of a sampler.

    Attributes:
      trees, samples: B and S: rows are B * S.
      prompt_columns: P, for all tokens of a prompt but the last.
      columns: M, tokens of a sample.
      parts: into how many the mesh splits the trees.
      read_tokens: see :data:`READ_TOKENS`.
    """

    trees: int
    samples: int
    prompt_columns: int
    columns: int
    parts: int = 1
    read_tokens: int = READ_TOKENS["cpu"]

    def reading(self, length: int) -> tuple[int, int]:
        """Return the columns in which a prompt of ``length`` tokens is read, and how many are read together."""
        columns = min(prompt_columns(length), self.prompt_columns)
        together = max(1, self.read_tokens // columns)
        return columns, self.parts * min(together, self.trees // self.parts)


def prompt_columns(length: int) -> int:
    """Return the columns for a prompt of ``length`` tokens, its last one apart: four sizes in each doubling."""
    real = max(length - 1, 16)
    return round_up(real, max(16, 1 << (real.bit_length() - 3)))


def choose_shape(
    program: Program, *, longest: int, samples: int, tokens: int, prompts: int, rows: int | None = None
) -> Shape:
    """Return the sizes for a task.

    Args:
      program: of the policy.
      longest: tokens of the longest prompt.
      samples: of each prompt.
      tokens: most tokens of a sample.
      prompts: how many there are.
      rows: B * S, about; chosen from the machine if not given.
    """
    mesh = program.mesh
    platform = "cpu" if mesh is None else mesh.devices.flat[0].platform
    parts = 1 if mesh is None else mesh_shape(mesh).batch_shards
    heads = (
        1 if mesh is None else mesh.shape["tensor"]
    )  # a device with fewer heads of a row has room for more rows
    wanted = max(1, (rows or parts * heads * ROWS.get(platform, 16)) // parts)  # of each part
    together = min(samples, wanted)
    trees = min(max(1, wanted // together), -(-prompts // parts))
    multiple = 1 if mesh is None else mesh.shape["sequence"]
    return Shape(
        trees=parts * trees,
        samples=together,
        prompt_columns=round_up(prompt_columns(longest), multiple),
        columns=round_up(tokens, 16),
        parts=parts,
        read_tokens=READ_TOKENS.get(platform, 512),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Programs:
    """The compiled functions of a sampler. Build with :func:`make_programs`.

    Attributes:
      shape: static sizes.
      empty: () -> (prompts, rows), all of them empty.
      read: (params, prompts, tokens [F, P + 1], lengths [F], numbers [F], trees [F]) -> prompts; reads new ones.
      restart: (rows, prompts, which [B, S], numbers [B, S]) -> rows; begins samples.
      run: (params, prompts, rows, ...) -> rows; see :func:`prb_jax.generation.steps.run_steps`.
      end: (rows, which [B, S]) -> rows; ends samples.
      of_policy: rows -> those of the policy, where the rows of another model are with them.
    """

    shape: Shape
    empty: Callable[[], tuple[Prompts, Rows]]
    read: Callable[..., Prompts]
    restart: Callable[..., Rows]
    run: Callable[..., Rows]
    end: Callable[[Rows, np.ndarray], Rows]
    of_policy: Callable[[Any], Rows] = lambda rows: rows


@functools.lru_cache(maxsize=16)
def make_programs(program: Program, shape: Shape) -> Programs:
    """Return the compiled programs; the same ones for equal arguments, so that nothing is compiled twice."""
    of_prompts, of_rows = program_shardings(program)
    jit = jax.jit
    whole = None if program.mesh is None else replicated(program.mesh)
    sharded: dict[str, Any] = {} if whole is None else {"out_shardings": of_rows}
    sharded_prompts: dict[str, Any] = {} if whole is None else {"out_shardings": of_prompts}

    def read(params: Params, held: Prompts, tokens: Any, lengths: Any, numbers: Any, trees: Any) -> Prompts:
        return steps.put_prompts(held, steps.read_prompts(program, params, tokens, lengths, numbers), trees)

    def make() -> tuple[Prompts, Rows]:
        return (
            steps.empty_prompts(program, trees=shape.trees, columns=shape.prompt_columns),
            steps.empty_rows(program, trees=shape.trees, samples=shape.samples, columns=shape.columns),
        )

    both: dict[str, Any] = {} if whole is None else {"out_shardings": (of_prompts, of_rows)}
    read_jit = jit(read, donate_argnums=(1,), **sharded_prompts)
    run_jit = run_program(program)

    def shown_read(params: Params, held: Prompts, tokens: np.ndarray, *rest: Any) -> Prompts:
        with compiling(read_jit, tokens.shape):
            return read_jit(params, held, tokens, *rest)

    def shown_run(
        params: Params, prompts: Prompts, rows: Rows, *, rules: Rules, stops: Stops, **rest: Any
    ) -> Rows:
        with compiling(run_jit, rows.tokens.shape, prompts.cache.columns):
            return run_jit(params, prompts, rows, rules=rules, stops=stops, **rest)

    return Programs(
        shape=shape,
        empty=jit(make, **both),
        read=shown_read,
        restart=jit(steps.restart, donate_argnums=(0,), **sharded),
        run=shown_run,
        end=jit(steps.ended, donate_argnums=(0,), **sharded),
    )


def run_program(program: Program) -> Any:
    """Return the jitted :func:`prb_jax.generation.steps.run_steps` of a policy; the rows are given up for new ones."""
    sharded: dict[str, Any] = {}
    if program.mesh is not None:
        sharded["out_shardings"] = program_shardings(program)[1]
    return jax.jit(functools.partial(steps.run_steps, program), donate_argnums=(2,), **sharded)


def program_shardings(program: Program) -> tuple[Any, Any]:
    """Return how prompts and rows are dealt over the mesh; None without one."""
    mesh = program.mesh
    if mesh is None:
        return None, None

    def split(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(axes))

    layers = program.config.num_hidden_layers
    prefix = (split("batch", "heads", "tokens", None),) * layers
    suffix = (split("batch", None, "heads", None, None),) * layers
    trees, rows, wide = split("batch"), split("batch", None), split("batch", None, None)
    prompts = Prompts(
        cache=steps.PrefixCache(prefix, prefix, trees),  # pyright: ignore[reportArgumentType]
        last=trees,  # pyright: ignore[reportArgumentType]
        numbers=trees,  # pyright: ignore[reportArgumentType]
        seen=split("batch", None),  # pyright: ignore[reportArgumentType]
    )
    kept = Rows(
        cache=steps.SuffixCache(suffix, suffix, rows),  # pyright: ignore[reportArgumentType]
        next=rows,  # pyright: ignore[reportArgumentType]
        numbers=rows,  # pyright: ignore[reportArgumentType]
        seen=wide,  # pyright: ignore[reportArgumentType]
        done=rows,  # pyright: ignore[reportArgumentType]
        tokens=wide,  # pyright: ignore[reportArgumentType]
        logprobs=wide,  # pyright: ignore[reportArgumentType]
        sampled_logprobs=wide,  # pyright: ignore[reportArgumentType]
    )
    return prompts, kept
