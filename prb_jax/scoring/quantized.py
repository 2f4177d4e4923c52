"""What the summary of a quantised model says of its weights."""

from typing import Any

from prb_jax.scoring.scored import Quantized

QUANTIZATION_DEFINITION = (
    "how the weights are quantised (form), and the whole model's bytes of parameters before (bytes_unquantized) and as "
    "held (bytes_held)"
)


def quantization_figures(scorer: Quantized) -> dict[str, Any]:
    """Return the entry "quantization" of a summary."""
    before, held = scorer.bytes_of_weights() or (None, None)
    return {"form": scorer.quantize, "bytes_unquantized": before, "bytes_held": held}
