"""Models: configuration, rotary embedding, attention, layers and the reward read-out.

Names of user options are defined here because importing this module does not load JAX.
"""

from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16"]
"""Dtype of computation."""

AttentionName = Literal["auto", "xla"]
"""Attention for the machine, or the XLA program; see :func:`prb_jax.models.attention.choice.choose_attention`."""

Remat = Literal["auto", "none", "dots", "full"]
"""Activations that the backward pass recomputes: chosen by memory (:mod:`prb_jax.training.memory`), or a policy of
:func:`prb_jax.models.rematerialised.rematerialised`."""

REMAT: Remat = "auto"
"""Default of training."""

Together = Literal["sum", "average", "norm"]
"""Reductions of a response's token log-probabilities to one number, as in RewardBench."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ATTENTIONS: tuple[AttentionName, ...] = get_args(AttentionName)
REMAT_POLICIES: tuple[Remat, ...] = get_args(Remat)

QUANTIZATIONS = ("int8", "int8-weights", "fp8")
"""Names in :data:`prb_jax.models.quantization.FORMS`."""
