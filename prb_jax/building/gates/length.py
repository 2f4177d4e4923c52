"""Neither side of a pair is the longer one more often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from prb_jax.building.gates.gate import Figure, Pair, chance_figure
from prb_jax.metrics.surface import count_words

DEFINITION: Final = "share of pairs whose chosen answer has more words; equal ones count half"


def measure(pairs: Sequence[Pair], *, level: float) -> Figure:
    """Return the share, which must be 0.5 within its interval over users."""
    words = np.array([[count_words(pair.chosen), count_words(pair.rejected)] for pair in pairs]).reshape(
        -1, 2
    )
    values = (np.sign(words[:, 0] - words[:, 1]) + 1) / 2
    means = words.mean(0) if pairs else (0.0, 0.0)
    note = f"{means[0]:.1f} words chosen, {means[1]:.1f} rejected"
    return chance_figure(values.tolist(), pairs, level=level, either_way=True, note=note)
