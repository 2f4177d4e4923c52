"""The optimiser and the measurement that both sides of the benchmark of training share."""

from dataclasses import dataclass

from prb_jax.training.optimizer import OptimizerConfig

OPTIMIZER = OptimizerConfig(steps=1000, learning_rate=1e-5, schedule="constant", clip_norm=1.0)
"""What both sides train with."""


@dataclass(frozen=True)
class TimedStep:
    """Wall seconds of one step, its loss, and the tokens it computed and needed."""

    seconds: float
    loss: float
    padded_tokens: int
    tokens: int
