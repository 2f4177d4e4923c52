"""`rollouts.jsonl`: some rollouts of some steps, to be read by people."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.reading import parse_json
from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError
from prb_jax.rl.learner import Looked
from prb_jax.rl.rollouts import Rollouts

ROLLOUTS = "rollouts.jsonl"


class KeptRollouts:
    """The file of rollouts, which grows by whole lines.

    Args:
      out: the run folder.
      step: steps made so far: rows beyond it, of a start that was killed later, are dropped, and so is a torn line.

    Raises:
      RunError: a line that is no rollout, or the file cannot be written.
    """

    def __init__(self, out: Path, *, step: int) -> None:
        self.path = out / ROLLOUTS
        kept = []
        data = self.path.read_bytes() if self.path.exists() else b""
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            where, hint = f"{self.path}:{number}: not a rollout", "remove the line to continue the run"
            row = parse_json(line, where=where, error=RunError, hint=hint)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise RunError(f"{where}; {hint}")
            if row["step"] <= step:
                kept.append(line + b"\n")
        with writing(self.path), whole_file(self.path) as file:
            file.writelines(kept)

    def write(
        self,
        step: int,
        comparisons: Sequence[Comparison],
        rollouts: Rollouts,
        scores: np.ndarray,
        looked: Looked,
    ) -> None:
        """Add the rollouts of these comparisons, the first ones of a step."""
        ratios = (looked.logprobs - looked.reference).sum(axis=-1)
        lengths, lines = rollouts.lengths, []
        for row, comparison in enumerate(comparisons):
            for k, text in enumerate(rollouts.texts[row]):
                value = {
                    "step": step,
                    "id": comparison.id,
                    "user_id": comparison.user_id,
                    "rollout": k,
                    "text": text,
                    "reward": float(scores[row, k]),
                    "kl": float(ratios[row, k]),
                    "tokens": int(lengths[row, k]),
                    "ended": bool(rollouts.ended[row, k]),
                }
                lines.append(json.dumps(value, allow_nan=False).encode() + b"\n")
        with writing(self.path), self.path.open("ab") as file:
            file.write(b"".join(lines))

    def sync(self) -> None:
        """Wait for the disk."""
        with writing(self.path), self.path.open("rb") as file:
            os.fsync(file.fileno())
