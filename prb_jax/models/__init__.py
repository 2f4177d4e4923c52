"""Decoder models: configuration, rotary embedding, attention, layers and the reward read-out.

The names that a user chooses from stand here, where they take no JAX to import.
"""

from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16"]
"""The dtype to compute in."""

AttentionName = Literal["auto", "xla"]
"""The machine's own choice, or the XLA program: see :func:`prb_jax.models.attention.choice.choose_attention`."""

Remat = Literal["none", "dots", "full"]
"""What the backward pass computes again: see :func:`prb_jax.models.decoder_layer.rematerialised`."""

REMAT: Remat = "dots"
"""What training computes again by default."""

Together = Literal["sum", "average", "norm"]
"""How the log-probabilities of a response's tokens become one number, as RewardBench has it."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ATTENTIONS: tuple[AttentionName, ...] = get_args(AttentionName)
REMAT_POLICIES: tuple[Remat, ...] = get_args(Remat)

QUANTIZATIONS = ("int8", "int8-weights", "fp8")
"""The names of :data:`prb_jax.models.quantization.FORMS`."""
