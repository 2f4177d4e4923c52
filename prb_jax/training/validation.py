"""Loss and accuracy on held-out comparisons, through the same scorer that evaluates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import RunError, quote
from prb_jax.metrics.accuracy import ScoredRow, outcomes
from prb_jax.training.losses import comparison_loss
from prb_jax.training.settings import TrainSettings
from prb_jax.training.splits import Part, user_weights

if TYPE_CHECKING:
    from prb_jax.training.trainer import Trainer


_loss = jax.jit(comparison_loss, static_argnames="config")


def validate(trainer: Trainer, held_out: Part, *, settings: TrainSettings) -> tuple[dict[str, float], float]:
    """Scores what is held out with the weights of now.

    Returns:
      Loss (that of training, so with smoothing and margins), accuracy and margin; and the number, smaller is better, by
      which `validation.metric` chooses the best checkpoint.

    Raises:
      RunError: a score is not finite, naming the comparison.
    """
    scores, comparisons = trainer.score(held_out.comparisons), held_out.known
    for comparison, row in zip(comparisons, scores, strict=True):
        if not np.isfinite(row).all():
            raise RunError(
                f"validation: comparison {quote(comparison.id)}: the scores {row.tolist()} are not finite"
            )
    responses = max(len(row) for row in scores)
    shape = (len(scores), responses)
    rewards, labels = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    mask = np.zeros(shape, bool)
    margin = np.zeros(len(scores), np.float32)
    for i, (comparison, row) in enumerate(zip(comparisons, scores, strict=True)):
        rewards[i, : len(row)], mask[i, : len(row)] = row, True
        labels[i, : len(row)] = comparison.labels
        margin[i] = comparison.margin or 0.0
    weights = user_weights(comparisons) if settings.loss.user_weights else np.ones(len(scores), np.float32)
    parts = _loss(
        jnp.asarray(rewards),
        labels=jnp.asarray(labels),
        mask=jnp.asarray(mask),
        margin=jnp.asarray(margin),
        weights=jnp.asarray(weights),
        config=trainer.settings.loss,
    )
    rows = [
        ScoredRow(c.id, c.subset, c.user_id, row.tolist(), list(c.labels or ()))
        for c, row in zip(comparisons, scores, strict=True)
    ]
    seen = outcomes(rows)
    numbers = {
        "loss": float(parts.loss_sum / parts.weight_sum),
        "accuracy": float(seen.wins.mean()),
        "margin": float(seen.margins.mean()),
    }
    return numbers, numbers["loss"] if settings.validation.metric == "loss" else -numbers["accuracy"]
