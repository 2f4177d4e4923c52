"""A reward and a gate: both read texts alone."""

from collections.abc import Mapping, Sequence

from prb_jax import Comparison
from prb_jax.building.gates.gate import Pair


def brevity(comparison: Comparison) -> list[float]:
    """Return one number for each response: the fewer words the better."""
    return [-float(len(response.split())) for response in comparison.responses]


def find_shouting(pairs: Sequence[Pair]) -> Mapping[str, str]:
    """An answer ends with two exclamation marks."""
    return {
        pair.id: "shouts" for pair in pairs if any(text.endswith("!!") for text in pair.comparison.responses)
    }
