"""Training: losses on trees, the optimiser, one step, and the loop around them."""

from typing import Literal, get_args

Tuning = Literal["head", "lora", "full"]
"""Part of the model that is trained. Defined here because importing this module does not load JAX."""

TUNINGS: tuple[Tuning, ...] = get_args(Tuning)

PASSES: dict[Tuning, float] = {"head": 1.0, "lora": 2.0, "full": 3.0}
"""Cost of the matrices of a training step in forward passes. "head": a frozen backbone needs no backward pass. "lora":
the backward pass computes gradients of activations. "full": it also computes gradients of the weights."""


def step_flops(forward: float, mixing: float, *, tuning: Tuning) -> float:
    """Return the FLOPs that a training step needs, without recomputation and without the products of adapters.

    Args:
      forward: FLOPs of a forward pass.
      mixing: The part in attention and recurrent states. Each product of a forward pass has two factors with gradients
        there, even if no weight is trained, so a backward pass costs twice as much.
      tuning: Part of the model that is trained.
    """
    return PASSES[tuning] * (forward - mixing) + (1.0 if tuning == "head" else 3.0) * mixing


LAYOUTS = ("standard", "value-head")
"""Formats in which checkpoints are written; see :mod:`prb_jax.training.layouts`."""
