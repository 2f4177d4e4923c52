"""Training: losses on trees, the optimiser, one step, and the loop around them."""

from typing import Literal, get_args

Tuning = Literal["head", "lora", "full"]
"""What is trained; here it takes no JAX to import."""

TUNINGS: tuple[Tuning, ...] = get_args(Tuning)
