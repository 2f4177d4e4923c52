"""What quantising a model changes in its scores: the part of an evaluation that compares the two."""

from collections.abc import Sequence
from typing import Any

from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.drift import DRIFT_DEFINITION, score_drift
from prb_jax.scoring.scored import Quantized

UNQUANTIZED = "unquantized"
"""The run folder of the unquantised model, within that of the quantised one."""

QUANTIZATION_DEFINITION = (
    "how the weights are quantised (form), the whole model's bytes of parameters before (bytes_unquantized) and as "
    f"held (bytes_held), and reference, null where the unquantised model was not scored; {DRIFT_DEFINITION}"
)


def check_reference(reference: bool | None, *, quantize: str | None) -> None:
    """Refuses a choice about the reference where there is nothing to compare.

    Raises:
      RunError: the model is not quantised by this call.
    """
    if reference is not None and quantize is None:
        raise RunError(
            "reference: is about a model that this evaluation quantises, and needs quantize (--quantize)"
        )


def quantization_figures(
    scorer: Quantized, rows: Sequence[ScoredRow], reference: Sequence[ScoredRow] | None, *, clusters: Clusters
) -> dict[str, Any]:
    """The entry "quantization" of a summary.

    Args:
      scorer: the quantised model.
      rows: its scores.
      reference: the unquantised model's scores of the same comparisons, if there are any.
      clusters: of the rows, in their order.
    """
    before, held = scorer.bytes_of_weights() or (None, None)
    return {
        "form": scorer.quantize,
        "bytes_unquantized": before,
        "bytes_held": held,
        "reference": None if reference is None else score_drift(rows, reference, clusters=clusters),
    }
