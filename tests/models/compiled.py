"""Programs of tests: compiled in little time, and what their text says."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from prb_jax.models import layers
from prb_jax.models.checkpoints.load import abstract_params

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Machine code is not what is tested, and takes most of the time."""


def largest_square(text: str) -> int:
    """The largest n for which a program, of XLA or StableHLO, holds an array with two axes of at least n."""
    shapes = re.findall(r"\b(?:f32|bf16|f16|pred|s32|u32|s8|u8)\[([\d,]+)\]", text)
    shapes += [shape.replace("x", ",") for shape in re.findall(r"tensor<([\dx]+)x\w+>", text)]
    sides = [sorted(map(int, shape.split(",")))[-2] for shape in shapes if "," in shape]
    assert sides
    return max(sides)


def with_cudnn() -> Any:
    """JAX asks for cuDNN's version before it writes a call down, also where the program is for another machine."""
    version = mock.Mock(return_value=91_000)
    return mock.patch("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", version)


def text_for_cuda(program: Any, *arguments: Any) -> str:
    """A program that may call cuDNN, lowered for a machine with a GPU of NVIDIA."""
    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    with with_cudnn():
        export = jax.export.export(jax.jit(program), platforms=("cuda",), disabled_checks=checks)
        return export(*arguments).mlir_module()


def no_stack_is_converted(config: Any, run: Callable[..., Any]) -> None:
    """Check that a program takes less memory in bfloat16 than in float32; on processors without instructions for
    bfloat16, but for one matrix that is converted.

    Args:
        config: Configuration of a decoder or an encoder.
        run: Function of its parameters and ``dtype``.
    """
    taken = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        params = abstract_params(config, dtype=dtype)
        compiled = jit(run, static_argnames="dtype").lower(params, dtype=dtype).compile()
        taken[dtype] = compiled.memory_analysis().temp_size_in_bytes
    matrix = max(leaf.size // len(leaf) for leaf in jax.tree.leaves(params["layers"])) * 4
    assert taken[jnp.bfloat16] < taken[jnp.float32] + (0 if layers.multiplies_bfloat16() else matrix)
