"""Comparisons that are too long for a model, left out of a run, counted and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError
from prb_jax.records.items import windows
from prb_jax.records.writing import json_line, whole_file, writing
from prb_jax.scoring.benchmark_scores import check_benchmarks
from prb_jax.scoring.inputs import Inputs
from prb_jax.scoring.reader import Reader
from prb_jax.text.view import View
from prb_jax.trees.encode import TooLongError

_AT_A_TIME: Final = 4096


@dataclass(frozen=True)
class LeftOut:
    """What is not scored."""

    reasons: Sequence[TooLongError]  # one for each comparison, in their order
    benchmarks: Mapping[str, int]  # of each benchmark, how many of its comparisons

    def to_json(self) -> dict[str, Any]:
        """The entry "left_out" of a summary."""
        subsets = Counter(reason.comparison.subset for reason in self.reasons if reason.comparison.subset)
        return {
            "comparisons": len(self.reasons),
            "by_subset": dict(sorted(subsets.items())),
            "by_benchmark": {name: count for name, count in self.benchmarks.items() if count},
        }

    def write(self, path: Path) -> None:
        """Names them in a file: id, subset, user_id, tokens, limit and reason of each; RunError where it cannot be."""
        with writing(path), whole_file(path) as file:
            for reason in self.reasons:
                one = reason.comparison
                row = {"id": one.id, "subset": one.subset, "user_id": one.user_id}
                row |= {"tokens": reason.tokens, "limit": reason.limit, "reason": str(reason)}
                file.write(json_line(row))


def leave_out(inputs: Inputs, reader: Reader, *, view: View, has_tokens: bool) -> Inputs:
    """Return the inputs without what is too long for the model.

    Raises:
      DataError: nothing would be left, or a benchmark's rule cannot be applied to the rest.
    """
    if has_tokens:  # nothing too long has tokens
        return replace(inputs, left_out=LeftOut([], {}))
    comparisons, reasons, dropped = inputs.comparisons, list[TooLongError](), set[int]()
    for window in windows(comparisons, first=_AT_A_TIME, size=_AT_A_TIME):
        errors = reader.too_long(window.comparisons, view=view)
        refused = {id(error.comparison) for error in errors}
        dropped |= {p for p, one in zip(window.places, window.comparisons) if id(one) in refused}
        reasons += errors
    count = len(comparisons)
    if len(reasons) == count:
        raise DataError(f"every comparison is too long, nothing is left to score; the first: {reasons[0]}")
    places = {old: new for new, old in enumerate(index for index in range(count) if index not in dropped)}
    positions = {
        name: [places[old] for old in members if old in places] for name, members in inputs.benchmarks.items()
    }
    lost = {name: len(members) - len(positions[name]) for name, members in inputs.benchmarks.items()}
    left = comparisons.without(dropped)
    inputs = replace(inputs, comparisons=left, benchmarks=positions, left_out=LeftOut(reasons, lost))
    check_benchmarks(inputs)
    return inputs
