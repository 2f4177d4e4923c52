"""LLMBar (arXiv 2310.07641): which of two outputs follows the instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from prb_jax.errors import quote
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks.benchmark import Benchmark, BenchmarkScore, Place, by_subset, is_won, mean

NATURAL: Final = "LLMBar/Natural"
ADVERSARIAL: Final = tuple(
    f"LLMBar/Adversarial/{name}" for name in ("Neighbor", "GPTInst", "GPTOut", "Manual")
)

_GROUPS: Final = ("LLMBar", "CaseStudy", "Processed")
"""The folders of the repository's ``Dataset``; a subset is named from there on."""

_LABELS: Final = {1: [1.0, 0.0], 2: [0.0, 1.0]}


def record(row: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """Both outputs in their published order; the subset is the folder of the file."""
    if "output_1" not in row:
        return row
    label = fields.number(row.get("label"), place.where, "label")
    if label not in _LABELS:
        fields.fail(place.where, "label", f"expected 1 or 2, found {quote(row['label'])}")
    folders = PurePosixPath(place.path).parent.parts
    start = max((i for i, name in enumerate(folders) if name in _GROUPS), default=0)
    subset = "/".join(folders[start:])
    return {
        "id": f"{subset}-{place.number - 1}",
        "question": row.get("input"),
        "responses": [row.get("output_1"), row.get("output_2")],
        "labels": _LABELS[int(label)],
        "subset": subset or None,
    }


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Accuracy of each subset; mean of the four adversarial ones; mean of Natural and those four.

    Rows of other folders of its repository (CaseStudy, Processed) enter nothing but "other_subsets".
    """
    needed = (NATURAL, *ADVERSARIAL)
    groups = by_subset(rows)
    subsets = {name: mean(map(is_won, members)) or 0.0 for name, members in sorted(groups.items())}
    rows_of_set = [row for name in needed for row in groups.get(name, ())]

    def mean_of(names: Sequence[str]) -> float | None:
        return mean(subsets[name] for name in names) if groups.keys() >= set(names) else None

    return BenchmarkScore(
        score=mean_of(needed),
        figures={
            "mean of adversarial": mean_of(ADVERSARIAL),
            **{name: value for name, value in subsets.items() if name in needed},
        },
        details={
            "pairs": len(rows_of_set),
            "accuracy": mean(map(is_won, rows_of_set)),
            "other_subsets": {name: value for name, value in subsets.items() if name not in needed},
        },
        missing=[name for name in needed if name not in groups],
    )


BENCHMARK = Benchmark(
    name="llmbar",
    rule="mean of the accuracies of Natural and the four adversarial subsets; a tie is a loss",
    score=score,
    files="**/dataset.json",
    home="the folder Dataset of github.com/princeton-nlp/LLMBar",
    record=record,
)
