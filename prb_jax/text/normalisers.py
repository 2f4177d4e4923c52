"""Normalisers of the `tokenizers` library: a hostile one makes texts longer than memory."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from prb_jax.errors import CheckpointError

_MOST_GROWTH = 100
"""Maximum growth factor of a text in the normaliser; normalisers of known models at most double it."""
_LONGEST_MAPPED = 64  # maximum bytes per character in a SentencePiece table; its own tables use at most 33


def check_growth(normalizer: Any, name: str) -> None:
    """Raise CheckpointError if the normaliser of the tokenizer `name` may make texts much longer."""
    growth = _growth(normalizer)
    if growth > _MOST_GROWTH:
        raise CheckpointError(
            f"{name}: tokenizer.json: normalizer: may make a text {growth:.3g} times as long; expected at most "
            f"{_MOST_GROWTH} times"
        )


def _growth(normalizer: Any) -> float:
    """Return an upper bound for the growth factor of a text in a normaliser of the `tokenizers` library.

    Unicode normal forms and case changes are not counted, because repeating them changes nothing.
    """
    steps: list[Any] = [json.loads(normalizer.__getstate__())]
    growth = 1.0
    while steps:
        step = steps.pop()
        kind = step.get("type")
        if kind == "Sequence":
            steps += step["normalizers"]
        elif kind == "Prepend":
            growth *= max(1, len(step["prepend"]))
        elif kind == "Replace":
            pattern, content = step["pattern"], len(step["content"])
            # A regular expression may match between two letters.
            growth *= max(1.0, content / len(pattern["String"])) if pattern.get("String") else content + 1
        elif kind == "Precompiled":
            table = base64.b64decode(step["precompiled_charsmap"] or "")
            longest = max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
            growth *= longest if longest > _LONGEST_MAPPED else 1
        if not math.isfinite(growth):
            break
    return growth
