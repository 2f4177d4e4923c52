"""JudgeBench (arXiv 2410.12784): an objectively right and a wrong answer of the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks.benchmark import (
    Benchmark,
    BenchmarkScore,
    Place,
    by_subset,
    check_finite,
    is_won,
    mean,
)

CATEGORIES: Final[Mapping[str, str]] = {
    "mmlu-pro": "knowledge",
    "livebench-reasoning": "reasoning",
    "livebench-math": "math",
    "livecodebench": "coding",
}
"""Start of the field ``source`` -> category."""

POOLED: Final = "pooled over response models"

_LABELS: Final = {"A>B": [1.0, 0.0], "B>A": [0.0, 1.0]}


def record(row: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """Both answers in their published order; subset "WRITER/CATEGORY", as "gpt/knowledge"."""
    if "response_A" not in row:
        return row
    label = fields.text(row.get("label"), place.where, "label")
    if label not in _LABELS:
        fields.fail(place.where, "label", f"expected {' or '.join(_LABELS)}, found {quote(label)}")
    source = fields.text(row.get("source"), place.where, "source")
    category = next((name for start, name in CATEGORIES.items() if source.startswith(start)), source)
    writer = fields.text(row.get("response_model") or place.split, place.where, "response_model")
    return {
        "id": row.get("pair_id"),
        "question": row.get("question"),
        "responses": [row.get("response_A"), row.get("response_B")],
        "labels": _LABELS[label],
        "subset": f"{writer.partition('-')[0]}/{category}",
        "category": source,
    }


def is_right(row: ScoredRow) -> bool:
    """Whether the benchmark's verdict, A if it scores above B and else B, is the label: a tie is a B."""
    check_finite(row)
    if len(row.scores) != 2:
        raise DataError(f"row {quote(row.id)}: expected a pair, found {len(row.scores)} responses")
    return (row.scores[0] > row.scores[1]) == (row.labels[0] > row.labels[1])


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Return the share of right verdicts: by the model that wrote the pairs, as published, and by subset.

    The score pools the models, and is called so.
    """
    subsets = by_subset(rows)
    writers: dict[str, list[ScoredRow]] = {}
    for subset, members in subsets.items():
        writers.setdefault(subset.partition("/")[0], []).extend(members)
    figures = {f"{writer} (all)": mean(map(is_right, members)) for writer, members in writers.items()}
    figures |= {subset: mean(map(is_right, subsets[subset])) for subset in sorted(subsets)}
    figures[POOLED] = mean(map(is_right, rows))
    return BenchmarkScore(
        score=figures[POOLED],
        figures=figures,
        details={
            "pairs": {name: len(members) for name, members in sorted(subsets.items())},
            "strict_accuracy": mean(map(is_won, rows)),
        },
    )


BENCHMARK = Benchmark(
    name="judgebench",
    rule="right verdicts / pairs, pooled over response models (published for each of them: the figures NAME (all)); "
    "the verdict is A if A scores above B, else B, so a tie counts as B",
    score=score,
    repository="ScalerLab/JudgeBench",
    splits=("gpt", "claude"),
    record=record,
)
