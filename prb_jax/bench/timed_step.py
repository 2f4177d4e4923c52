"""The optimiser and the measurement that both sides of the benchmark of training share."""

from dataclasses import dataclass

from prb_jax.training.settings import OptimizerSettings

STEPS = 1000
LEARNING_RATE = 1e-5
KL_COEFFICIENT = 0.04
"""Of the KL in the loss of a policy."""

OPTIMIZER = OptimizerSettings(
    learning_rate=LEARNING_RATE,
    schedule="constant",
    warmup_share=0.0,
    weight_decay=0.0,
    b2=0.999,
    clip_norm=1.0,
)
"""What both sides train with."""


@dataclass(frozen=True)
class TimedStep:
    """Wall seconds of one step, its loss, and the tokens it computed and needed."""

    seconds: float
    loss: float
    padded_tokens: int
    tokens: int
