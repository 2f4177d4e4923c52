"""Comparisons that a run skips because they are too long for the model; they are counted and listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError, RunError, quote
from prb_jax.records.items import windows
from prb_jax.records.writing import json_line, whole_file, writing
from prb_jax.scoring import TOO_LONG
from prb_jax.scoring.benchmark_scores import check_benchmarks
from prb_jax.scoring.inputs import Inputs
from prb_jax.scoring.reader import Reader
from prb_jax.text.view import View
from prb_jax.trees.tree import TooLongError

_AT_A_TIME: Final = 4096


@dataclass(frozen=True)
class LeftOut:
    """Skipped comparisons of a run."""

    reasons: Sequence[TooLongError]  # one per skipped comparison, in order
    benchmarks: Mapping[str, int]  # number of skipped comparisons by benchmark

    def to_json(self) -> dict[str, Any]:
        """Return the entry "left_out" of a summary."""
        subsets = Counter(reason.comparison.subset for reason in self.reasons if reason.comparison.subset)
        return {
            "comparisons": len(self.reasons),
            "by_subset": dict(sorted(subsets.items())),
            "by_benchmark": {name: count for name, count in self.benchmarks.items() if count},
        }

    def write(self, path: Path) -> None:
        """Write id, subset, user_id, tokens, limit and reason of each comparison to a file; RunError on failure."""
        with writing(path), whole_file(path) as file:
            for reason in self.reasons:
                one = reason.comparison
                row = {"id": one.id, "subset": one.subset, "user_id": one.user_id}
                row |= {"tokens": reason.tokens, "limit": reason.limit, "reason": str(reason)}
                file.write(json_line(row))


def leave_out(inputs: Inputs, reader: Reader, *, view: View, has_tokens: bool) -> Inputs:
    """Return the inputs without the comparisons that are too long for the model.

    Raises:
      DataError: Nothing is left, or a benchmark's rule cannot be applied to the rest.
    """
    if has_tokens:  # `prb prepare` refuses comparisons that are too long
        return replace(inputs, left_out=LeftOut([], {}))
    comparisons, reasons, dropped = inputs.comparisons, list[TooLongError](), set[int]()
    without_profiles = replace(view, profile_posts=0)  # they are shortened before anything else
    for window in windows(comparisons, first=_AT_A_TIME, size=_AT_A_TIME):
        encoded = reader.encode_each(window.comparisons, view=without_profiles)
        errors = [tree for tree in encoded if isinstance(tree, TooLongError)]
        refused = {id(error.comparison) for error in errors}
        dropped |= {p for p, one in zip(window.places, window.comparisons) if id(one) in refused}
        reasons += errors
    count = len(comparisons)
    if len(reasons) == count:
        raise DataError(f"every comparison is too long, so nothing is left to score; the first: {reasons[0]}")
    places = {old: new for new, old in enumerate(index for index in range(count) if index not in dropped)}
    positions = {
        name: [places[old] for old in members if old in places] for name, members in inputs.benchmarks.items()
    }
    lost = {name: len(members) - len(positions[name]) for name, members in inputs.benchmarks.items()}
    left = comparisons.without(dropped)
    inputs = replace(inputs, comparisons=left, benchmarks=positions, left_out=LeftOut(reasons, lost))
    check_benchmarks(inputs)
    return inputs


def check_too_long(too_long: str, reader: Reader | None, *, view: View) -> None:
    """Check that `too_long` is known and has an effect.

    Raises:
      RunError: The choice is unknown, or "skip" has no effect: the protocol cuts responses, or the scorer has no length
        limit.
    """
    if too_long not in TOO_LONG:
        raise RunError(f"too_long: expected {' or '.join(TOO_LONG)}, found {quote(too_long)}")
    if too_long == "skip" and reader is None:
        raise RunError("too_long=skip: this scorer has no length limit, so nothing is too long for it")
    if too_long == "skip" and view.protocol.cuts_responses:
        raise RunError(f"too_long=skip: the {view.protocol} protocol cuts responses, so none is too long")
