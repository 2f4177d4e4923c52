"""Rules that turn the values of a head into one reward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from prb_jax.errors import CheckpointError, quote

READOUTS = ("logit", "first-logit", "last-softmax")
ALL_VALUES = "all-values"
"""The rule of a caller that reads every value of the head itself; no user can name it."""
PAPER_READOUT = "last-softmax"
"""How the paper protocol reads a head with several labels where no rule is named."""


def choose_readout(name: str | None, *, num_labels: int, where: str) -> str:
    """The rule that turns ``num_labels`` logits into a reward.

    ``logit`` takes the only one. A head with several needs a rule by name: ``first-logit`` compares the
    first (RewardBench does), ``last-softmax`` takes the last entry of the softmax (the scripts of
    Personalised RewardBench do).

    Raises:
      CheckpointError: an unknown rule, or none that fits the head.
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
            f"{where}: the score head has {num_labels} labels, and nothing says which of them is the reward: "
            f"choose --readout first-logit or last-softmax (protocol paper alone takes {PAPER_READOUT} by itself)"
        )
    return str(name)


def read_out(logits: jax.Array, readout: str) -> jax.Array:
    """Rewards float32 [...] from logits float32 [..., num_labels]; with :data:`ALL_VALUES` all of them, as they are."""
    if readout == ALL_VALUES:
        return logits
    if readout == "last-softmax":
        return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)[..., -1]
    return logits[..., 0]
