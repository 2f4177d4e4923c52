"""Training: losses on trees, the optimiser, one step, and the loop around them."""

from typing import Literal, get_args

Tuning = Literal["head", "lora", "full"]
"""Part of the model that is trained. Defined here because importing this module does not load JAX."""

TUNINGS: tuple[Tuning, ...] = get_args(Tuning)

PASSES: dict[Tuning, float] = {"head": 1.0, "lora": 2.0, "full": 3.0}
"""Cost of a training step in forward passes. "head": a frozen backbone needs no backward pass. "lora": the
backward pass computes gradients of activations. "full": it also computes gradients of the weights."""

LAYOUTS = ("standard", "value-head")
"""Formats in which checkpoints are written; see :mod:`prb_jax.training.layouts`."""
