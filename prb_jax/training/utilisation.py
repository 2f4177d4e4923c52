"""Model FLOPs utilisation (MFU): what training needs on paper, beside what the devices could do."""

from __future__ import annotations

import functools

import jax

from prb_jax.models.flops import measured_peak
from prb_jax.training import Tuning

PASSES: dict[Tuning, float] = {"head": 1.0, "lora": 2.0, "full": 3.0}
"""FLOPs of a step in forward passes: a frozen backbone under a trained head has no backward pass; under
adapters only that through the activations; a trained one also that of its weights."""

# Dense bfloat16 FLOP/s of a device, from the vendors' data sheets.
_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


@functools.cache
def device_peak(dtype: str) -> float:
    """FLOP/s of one device: of its data sheet where it is known, else the best of some matrix products."""
    kind = jax.devices()[0].device_kind
    if dtype == "bfloat16":
        for name in sorted(_PEAKS, key=len, reverse=True):
            if kind.startswith(name):
                return _PEAKS[name]
    return measured_peak(dtype, seconds=0.2)
