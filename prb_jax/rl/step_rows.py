"""Files of JSON lines that grow step by step: `rollouts.jsonl`, to be read by people, and `gold.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prb_jax.data.comparison import Comparison
from prb_jax.data.reading import parse_json
from prb_jax.data.writing import json_line, whole_file, writing
from prb_jax.errors import RunError
from prb_jax.rl.rollouts import StepBatch

ROLLOUTS = "rollouts.jsonl"


class StepRows:
    """A file of rows with a `step`, which grows by whole lines.

    Args:
      path: of the file; it need not be there.
      step: steps made so far: rows beyond it, of a start that was killed later, are dropped, and so is a torn line.

    Raises:
      RunError: a line that is no such row, or the file cannot be written.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self.path = path
        self.rows = [row for row in read_step_rows(path) if row["step"] <= step]
        with writing(path), whole_file(path) as file:
            file.writelines(map(json_line, self.rows))

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of a step."""
        self.rows += map(dict, rows)
        with writing(self.path), self.path.open("ab") as file:
            file.write(b"".join(map(json_line, rows)))

    def sync(self) -> None:
        """Wait for the disk."""
        with writing(self.path), self.path.open("rb") as file:
            os.fsync(file.fileno())


def read_step_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without a torn last line; none where there is no file.

    Raises:
      RunError: a line that is no such row.
    """
    found = []
    data = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        where, hint = f"{path}:{number}: not a row of a step", "remove the line to continue the run"
        row = parse_json(line, where=where, error=RunError, hint=hint)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise RunError(f"{where}; {hint}")
        found.append(row)
    return found


def rollout_rows(step: int, comparisons: Sequence[Comparison], batch: StepBatch) -> list[dict[str, Any]]:
    """Return the rollouts of these comparisons, the first ones of a step, as rows.

    Args:
      step: number of the step, from 1.
      comparisons: of the prompts.
      batch: of the step, with scores and stats.
    """
    assert batch.stats is not None
    ratios = (batch.stats.logprobs - batch.stats.reference).sum(axis=-1)
    lengths = batch.lengths
    return [
        {
            "step": step,
            "id": comparison.id,
            "user_id": comparison.user_id,
            "rollout": k,
            "text": text,
            "reward": float(batch.scores[row, k]),
            "kl": float(ratios[row, k]),
            "tokens": int(lengths[row, k]),
            "ended": bool(batch.ended[row, k]),
        }
        for row, comparison in enumerate(comparisons)
        for k, text in enumerate(batch.texts[row])
    ]
