"""Files of the run folder of `prb evaluate`, `prb judge` and the controls; `prb_jax.scoring.run` opens and fills it.

``scores.jsonl``    One row per comparison, in the order of completion; rewritten once at the end, in the order of the
                    input.
``blocks.jsonl``    Only while data larger than memory is read: see :mod:`prb_jax.runs.blocks`.
``computed.jsonl``  Until the run is finished: for each batch of a model one comparison of the batch, the tokens
                    computed, and the comparisons with equal token sequences on both sides. ``run.json`` gets the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypedDict

from prb_jax.errors import RunError, quote
from prb_jax.metrics.rows import RowTable, ScoredRow
from prb_jax.runs.kind import RunKind
from prb_jax.runs.rows import Row, RowKind

SCORES: Final = "scores.jsonl"
JUDGEMENTS: Final = "judgements.jsonl"
"""One row per comparison that a judge judged: its verdicts or ratings, and its replies."""
CLUSTERS: Final = "clusters.jsonl"
USERS: Final = "users.csv"
LEFT_OUT: Final = "left_out.jsonl"
BLOCKS: Final = "blocks.jsonl"
COMPUTED: Final = "computed.jsonl"
COMPUTED_TOKENS: Final = "computed_tokens"
CONTROL_RUNS: Final = "controls"
"""Folder inside a run folder with the run folder of each control."""
_LARGEST_COUNT: Final = 1 << 62
_LARGEST_SCORE: Final = 3.4028234663852886e38  # of float32


def _as_object(row: ScoredRow) -> Row:
    """Return the JSON object of a row; float32 becomes the equal float64, so reading restores the same bits."""
    scores = [float(score) for score in row.scores]
    if not all(math.isfinite(score) for score in scores):
        raise RunError(
            f"comparison {quote(row.id)}: the model gave the scores {scores}; expected finite numbers "
            f"(float16 and broken weights overflow; try --dtype float32)"
        )
    values = {name: getattr(row, name) for name in _FIELDS}
    return values | {"scores": scores, "labels": [float(label) for label in row.labels]}


def _as_row(value: dict[str, Any]) -> ScoredRow:
    row = ScoredRow(**{name: value[name] for name in _FIELDS})
    cuts = (row.truncated,) if isinstance(row.truncated, int) else row.truncated.values()
    if odd := value.keys() - set(_FIELDS):
        raise ValueError(f"field {quote(min(odd))} is not a field of a row")
    if not len(row.scores) == len(row.labels) >= 2:
        raise ValueError(
            f"expected one label per score, at least two, found {len(row.scores)} and {len(row.labels)}"
        )
    if any(abs(score) > _LARGEST_SCORE for score in row.scores):
        raise ValueError(f"field 'scores': expected float32 numbers, found {quote(row.scores)}")
    if not all(0 <= count < _LARGEST_COUNT for count in (row.tokens, *cuts)):
        raise ValueError("fields 'tokens' and 'truncated': expected numbers of 0 or more")
    return row


class ScoreLine(TypedDict):
    """A line of ``scores.jsonl``."""

    id: str
    subset: str | None
    user_id: str | None
    scores: list[float]
    labels: list[float]
    tokens: int
    truncated: int | dict[str, int]


_FIELDS: Final = tuple(item.name for item in fields(ScoredRow))
SCORE_ROWS: Final = RowKind(
    SCORES, "scores", attrgetter("id"), ScoreLine, decode=_as_row, encode=_as_object, table=RowTable
)


EVALUATION: Final = RunKind(
    "prb_jax evaluation",
    "prb evaluate",
    rows=SCORE_ROWS,
    inputs="prb_jax.runs.evaluation_inputs:EvaluationInputs",
    # the last pattern matches RewardBench's result files: `AGGREGATES` of `prb_jax.records.benchmarks.benchmark`
    sealed=(CLUSTERS, JUDGEMENTS, USERS, LEFT_OUT, "*/eval-set/**/*.json"),
)


def is_settled(out: str | Path) -> bool:
    """Return True if a folder holds scores of fully known data, which the caller must compare with its data first.

    Raises:
      RunError: the folder holds another kind of run.
    """
    path = Path(out)
    scored = (path / SCORES).is_file() and (path / SCORES).stat().st_size > 0
    record = EVALUATION.read(path) if scored else None
    return record is not None and not is_open(record["inputs"])


def is_open(inputs: Mapping[str, Any]) -> bool:
    """Return True if the inputs of a run do not identify its data yet."""
    data = inputs.get("data")
    return isinstance(data, Mapping) and data.get("comparisons", 0) is None
