"""AdamW with a schedule, clipping by global norm, and weight decay of matrices only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prb_jax.training.settings import OptimizerSettings


def learning_rate(options: OptimizerSettings, *, lengths: Sequence[int]) -> optax.Schedule:
    """Return the rate as a function of the number of updates made so far, float32 [].

    Args:
      options: with a `learning_rate`, the peak.
      lengths: updates of the whole run, ascending; several of a run that was lengthened. Updates before an earlier
        end follow the schedule of that length, and those after it the schedule of the next one. The warm-up is
        that of the first length.
    """
    assert options.learning_rate is not None
    peak, final = options.learning_rate, options.learning_rate * options.final_share
    warmup = round(options.warmup_share * lengths[0])

    def course(step: jax.Array, length: int) -> jax.Array:
        """The rate after the warm-up in a run of this length."""
        after_warmup = length - warmup
        if options.schedule == "constant":
            return jnp.full_like(step, peak)
        if options.schedule == "wsd":
            # A fall that is longer than what the warm-up leaves starts right after it.
            falling = max(1, min(max(1, round(length * options.decay_share)), after_warmup))
            share = jnp.clip((step - (length - falling)) / falling, 0.0, 1.0)
        else:
            share = jnp.clip((step - warmup) / max(1, after_warmup), 0.0, 1.0)
            if options.schedule == "cosine":
                share = 0.5 * (1.0 - jnp.cos(jnp.pi * share))
        return peak + (final - peak) * share

    def rate(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        value = course(step, lengths[-1])
        for length in reversed(lengths[:-1]):
            value = jnp.where(step < length, course(step, length), value)
        if warmup:
            value = jnp.where(step < warmup, peak * (step + 1.0) / warmup, value)
        return value

    return rate


def make_optimizer(options: OptimizerSettings, *, lengths: Sequence[int]) -> optax.GradientTransformation:
    """Clipping, AdamW and the schedule. The state holds two float32 moments for each trainable leaf."""
    parts = [] if options.clip_norm is None else [optax.clip_by_global_norm(options.clip_norm)]
    return optax.chain(
        *parts,
        optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps),
        optax.add_decayed_weights(options.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate(options, lengths=lengths)),
    )


def decay_mask(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Which leaves of a nested dict of parameters decay: all but norms and biases."""
    return {
        name: decay_mask(leaf) if isinstance(leaf, Mapping) else not name.endswith(("norm", "bias"))
        for name, leaf in tree.items()
    }
