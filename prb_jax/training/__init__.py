"""Training: losses on trees, the optimiser, one step, and the loop around them."""

from typing import Literal, get_args

Tuning = Literal["head", "lora", "full"]
"""What is trained; here it takes no JAX to import."""

TUNINGS: tuple[Tuning, ...] = get_args(Tuning)

PASSES: dict[Tuning, float] = {"head": 1.0, "lora": 2.0, "full": 3.0}
"""FLOPs of a step in forward passes: a frozen backbone under a trained head has no backward pass; under
adapters only that through the activations; a trained one also that of its weights."""

LAYOUTS = ("standard", "value-head")
"""Of checkpoints that are written: see :mod:`prb_jax.training.layouts`."""
