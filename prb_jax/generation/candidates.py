"""What the best of n samples is chosen from: the samples of each prompt, and their quality where a file has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.generation.sample import FIELDS as SAMPLE_FIELDS
from prb_jax.generation.sample import SAMPLES, row_key
from prb_jax.runs.folder import as_recorded
from prb_jax.runs.rows import read_rows
from prb_jax.scoring.inputs import read_inputs


@dataclass(frozen=True)
class Candidates:
    """The samples of one prompt that can be scored.

    Attributes:
      comparison: the samples as responses, without labels.
      numbers: of the samples, as `prb sample` counts them.
      reference: the response of the data with the highest label.
      user: of the prompt.
    """

    comparison: Comparison
    numbers: tuple[int, ...]
    reference: str
    user: str | None

    def only(self, places: Sequence[int] | np.ndarray) -> Candidates:
        """Return the samples at these places alone."""
        texts = [self.comparison.responses[place] for place in places]
        numbers = tuple(self.numbers[place] for place in places)
        return replace(self, comparison=replace(self.comparison, responses=texts), numbers=numbers)


def read_candidates(
    folder: Path, run: Mapping[str, Any], data: Sequence[str] | None
) -> tuple[list[Candidates], list[str], int]:
    """Return the prompts with a sample that can be scored; the ids of those without one; and how many are empty.

    Args:
      folder: of a finished run of `prb sample`.
      run: what its `run.json` says.
      data: of the samples, where it has another name now.

    Raises:
      DataError: samples of other data, or nothing but empty samples.
    """
    inputs, names = run["inputs"], data or run.get("data")
    if not names:
        raise DataError(f"{folder}: its data was given from Python: name it with --data")
    read = read_inputs(names, subset=inputs["data"]["subset"], limit=inputs["limit"])
    recorded = as_recorded(read.to_json())
    if _contents(recorded) != _contents(inputs["data"]):
        raise DataError(
            f"{folder}: its samples are of other data than {', '.join(map(str, names))} now: expected "
            f"{quote(_contents(inputs['data']))}, found {quote(_contents(recorded))}"
        )
    rows = read_rows(folder / SAMPLES, what="samples", key=row_key, fields=SAMPLE_FIELDS)
    texts: dict[str, list[tuple[int, str]]] = {}
    empty = 0
    for row in rows.values():
        if row["text"].strip():
            texts.setdefault(row["id"], []).append((row["sample"], row["text"]))
        else:
            empty += 1
    found, left_out = [], []
    for each in read.comparisons:
        own = sorted(texts.get(each.id, ()))
        if not own:
            left_out.append(each.id)
            continue
        assert each.labels is not None
        candidates = replace(each, responses=[text for _, text in own], labels=None)
        best = each.responses[int(np.argmax(each.labels))]
        found.append(Candidates(candidates, tuple(number for number, _ in own), best, each.user_id))
    if not found:
        raise DataError(f"{folder}: every sample is empty: there is nothing to choose from")
    return found, left_out, empty


def _contents(data: Mapping[str, Any]) -> Any:
    """What data is made of, without its names."""
    files = [
        sorted(str(value) for value in (source.get("files") or {}).values()) for source in data["sources"]
    ]
    return {"comparisons": data["comparisons"], "sha256": data["sha256"], "files": files}


def given_quality(quality: str, found: Sequence[Candidates]) -> list[np.ndarray] | None:
    """Return the numbers [K] of each prompt's samples in a file of qualities; None where they are computed.

    Raises:
      DataError: a number that is missing, or not finite; names the sample.
    """
    if not quality.endswith((".jsonl", ".json")):
        return None
    rows = read_rows(Path(quality), what="qualities", key=row_key, fields=("id", "sample", "quality"))
    values = []
    for each in found:
        own = [rows.get((each.comparison.id, number), {}).get("quality") for number in each.numbers]
        for number, value in zip(each.numbers, own, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
                raise DataError(
                    f"{quality}: expected a finite quality of sample {number} of {quote(each.comparison.id)}, found "
                    f"{quote(value)}"
                )
        values.append(np.asarray(own, np.float64))
    return values
