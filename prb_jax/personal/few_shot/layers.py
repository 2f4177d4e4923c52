"""Small networks as plain trees of arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from prb_jax.personal.few_shot.choices import Array


def init_linear(
    rng: np.random.Generator, inputs: int, outputs: int, *, gain: float = 1.0
) -> dict[str, np.ndarray]:
    """Return a linear map: w float32 [inputs, outputs] of variance gain^2 / inputs, b zero."""
    weight = rng.normal(0, gain / np.sqrt(inputs), (inputs, outputs)).astype(np.float32)
    return {"w": weight, "b": np.zeros(outputs, np.float32)}


def linear(params: Any, x: Array) -> jax.Array:
    """Return x w + b."""
    return x @ params["w"] + params["b"]


def init_mlp(
    rng: np.random.Generator, sizes: Sequence[int], *, last: float = 1.0
) -> list[dict[str, np.ndarray]]:
    """Return the linear maps between layers of these sizes; ``last`` is the gain of the last one."""
    gains = [*[1.0] * (len(sizes) - 2), last]
    return [
        init_linear(rng, *ends, gain=gain)
        for ends, gain in zip(itertools.pairwise(sizes), gains, strict=True)
    ]


def mlp(params: Any, x: Array, activation: Callable[[Array], Array]) -> jax.Array:
    """Return the last layer, which has no activation."""
    for layer in params[:-1]:
        x = activation(linear(layer, x))
    return linear(params[-1], x)


def attend(queries: Array, keys: Array, values: Array, mask: Array) -> jax.Array:
    """Return softmax(q k^T / sqrt(h)) v over the keys that ``mask`` allows.

    Args:
      queries: float32 [..., Q, h].
      keys, values: float32 [..., T, h].
      mask: bool [T]; at least one is True.
    """
    logits = queries @ keys.swapaxes(-1, -2) / np.sqrt(queries.shape[-1])
    weights = jax.nn.softmax(jax.numpy.where(mask, logits, -1e30), axis=-1)
    return weights @ values
