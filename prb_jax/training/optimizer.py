"""AdamW with a schedule, clipping by global norm, and weight decay of matrices only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import optax

from prb_jax.errors import DataError, quote

ScheduleName = Literal["constant", "linear", "cosine", "wsd"]
SCHEDULES: tuple[ScheduleName, ...] = ("constant", "linear", "cosine", "wsd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
        steps: updates of the whole run; the schedule ends there.
        learning_rate: its highest value.
        schedule: after the warm-up ``constant``; ``linear`` or ``cosine`` down to the final value over
            all remaining steps; ``wsd`` (warmup-stable-decay) constant, then linearly down to it.
        warmup_steps: the rate rises linearly from 0; the first update already has 1 / warmup_steps of it.
        final_share: final learning rate as a share of the highest.
        decay_share: ``wsd`` only: share of all steps in which the rate falls.
        weight_decay: decoupled, times the learning rate, on matrices only (no norms, no biases).
        b1, b2, eps: of Adam.
        clip_norm: gradients with a larger global norm are scaled down to it; None for no clipping.
    """

    steps: int
    learning_rate: float = 1e-4
    schedule: ScheduleName = "cosine"
    warmup_steps: int = 0
    final_share: float = 0.1
    decay_share: float = 0.2
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise DataError(f"optimizer.{name}: expected {expected}, found {quote(getattr(self, name))}")

        check("steps", self.steps >= 1, "at least 1")
        check("learning_rate", self.learning_rate > 0, "more than 0")
        check("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        check("warmup_steps", 0 <= self.warmup_steps <= self.steps, f"0 to steps ({self.steps})")
        check("final_share", 0 <= self.final_share <= 1, "0 to 1")
        check("decay_share", 0 <= self.decay_share <= 1, "0 to 1")
        check("weight_decay", self.weight_decay >= 0, "at least 0")
        check("b1", 0 <= self.b1 < 1, "at least 0 and less than 1")
        check("b2", 0 <= self.b2 < 1, "at least 0 and less than 1")
        check("eps", self.eps > 0, "more than 0")
        check("clip_norm", self.clip_norm is None or self.clip_norm > 0, "more than 0, or None")


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """The rate as a function of the number of updates made so far, float32 []."""
    peak, final = config.learning_rate, config.learning_rate * config.final_share
    falling = max(1, round(config.steps * config.decay_share))
    after_warmup = config.steps - config.warmup_steps

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        since = step - config.warmup_steps
        if config.schedule == "constant":
            value = jnp.full_like(step, peak)
        elif config.schedule == "wsd":
            # A fall that is longer than what the warm-up leaves starts right after it.
            length = max(1, min(falling, after_warmup))
            share = jnp.clip((step - (config.steps - length)) / length, 0.0, 1.0)
            value = peak + (final - peak) * share
        else:
            share = jnp.clip(since / max(1, after_warmup), 0.0, 1.0)
            if config.schedule == "cosine":
                share = 0.5 * (1.0 - jnp.cos(jnp.pi * share))
            value = peak + (final - peak) * share
        if config.warmup_steps:
            value = jnp.where(since < 0, peak * (step + 1.0) / config.warmup_steps, value)
        return value

    return rate


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, AdamW and the schedule. The state holds two float32 moments for each trainable leaf."""
    parts = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    return optax.chain(
        *parts,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate(config)),
    )


def decay_mask(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Which leaves of a nested dict of parameters decay: all but norms and biases."""
    return {
        name: decay_mask(leaf) if isinstance(leaf, Mapping) else not name.endswith(("norm", "bias"))
        for name, leaf in tree.items()
    }
