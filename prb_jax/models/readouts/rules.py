"""Rules that reduce the values of a head to one reward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from prb_jax.errors import CheckpointError, quote

READOUTS = ("logit", "first-logit", "last-softmax")
ALL_VALUES = "all-values"
"""Internal rule for callers that read every value of the head; not available to users."""
PAPER_READOUT = "last-softmax"
"""Rule of the paper protocol for a head with several labels, if none is named."""


def choose_readout(name: str | None, *, num_labels: int, where: str) -> str:
    """Return the rule that reduces ``num_labels`` logits to a reward.

    ``logit`` takes the only logit. A head with several logits requires a named rule: ``first-logit`` takes the first,
    as in RewardBench; ``last-softmax`` takes the last entry of the softmax, as in the scripts of Personalised
    RewardBench.

    Raises:
      CheckpointError: The rule is unknown, or no rule fits the head.
    """
    if name is not None and name not in READOUTS:
        raise CheckpointError(
            f"{where}: unknown readout {quote(name)}: expected one of {', '.join(READOUTS)}"
        )
    if num_labels == 1:
        if name not in (None, "logit"):
            raise CheckpointError(
                f"{where}: readout {quote(name)} needs several labels, the score head has one"
            )
        return "logit"
    if name in (None, "logit"):
        raise CheckpointError(
            f"{where}: the score head has {num_labels} labels, and none is named as the reward: "
            f"choose --readout first-logit or last-softmax (only protocol paper has a default, {PAPER_READOUT})"
        )
    return str(name)


def read_out(logits: jax.Array, readout: str) -> jax.Array:
    """Return rewards float32 [...] from logits float32 [..., num_labels]; with :data:`ALL_VALUES` all logits."""
    if readout == ALL_VALUES:
        return logits
    if readout == "last-softmax":
        return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)[..., -1]
    return logits[..., 0]
