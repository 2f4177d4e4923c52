"""Comparisons that no length limit can be kept for without cutting a response: refused, or left out and named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import DataError, RunError, quote
from prb_jax.scoring import TOO_LONG
from prb_jax.scoring.inputs import Inputs
from prb_jax.sources.large import chosen
from prb_jax.text.protocol import FACTS
from prb_jax.text.view import View
from prb_jax.trees.shorten import TooLongError

if TYPE_CHECKING:
    from prb_jax.scoring.reader import Reader

_AT_A_TIME = 4096

LEFT_OUT = "left_out.jsonl"
LEFT_OUT_DEFINITION = (
    f"comparisons that were not scored, because a response leaves no room for its prompt within the limit, named in "
    f"{LEFT_OUT}: how many, by subset, and by benchmark; they enter no other figure"
)


@dataclass(frozen=True)
class LeftOut:
    """What is not scored.

    Attributes:
      reasons: one for each comparison, in their order.
      benchmarks: of each benchmark, how many of its comparisons.
    """

    reasons: Sequence[TooLongError]
    benchmarks: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The entry "left_out" of a summary."""
        subsets = Counter(each.comparison.subset or "" for each in self.reasons)
        return {
            "comparisons": len(self.reasons),
            "by_subset": {name: subsets[name] for name in sorted(subsets) if name},
            "by_benchmark": {name: count for name, count in self.benchmarks.items() if count},
        }

    def write(self, folder: Path) -> None:
        """Names them in a file of the run: id, subset, user_id, tokens, limit and reason of each.

        Raises:
          RunError: it cannot be written.
        """
        rows = [
            {
                "id": each.comparison.id,
                "subset": each.comparison.subset,
                "user_id": each.comparison.user_id,
                "tokens": each.tokens,
                "limit": each.limit,
                "reason": str(each),
            }
            for each in self.reasons
        ]
        with writing(folder / LEFT_OUT), whole_file(folder / LEFT_OUT) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in rows)


def check_too_long(too_long: str, reader: Reader | None, *, view: View) -> None:
    """Refuses a choice that there is not, or that could not change anything.

    Raises:
      RunError: unknown; or "skip" for a protocol that cuts responses, or a scorer without a length limit.
    """
    if too_long not in TOO_LONG:
        raise RunError(f"too_long: expected {' or '.join(TOO_LONG)}, found {quote(too_long)}")
    if too_long == "error":
        return
    if FACTS[view.protocol].cuts_responses:
        raise RunError(
            f"too_long=skip: the {view.protocol} protocol cuts responses, so that none is too long"
        )
    if reader is None:
        raise RunError("too_long=skip: this scorer has no length limit, so that nothing is too long for it")


def leave_out(inputs: Inputs, reader: Reader, *, view: View) -> tuple[Inputs, LeftOut]:
    """The inputs without what is too long for the model, and what that is.

    Raises:
      DataError: nothing would be left.
    """
    reasons, dropped = [], set()
    for start in range(0, len(inputs.comparisons), _AT_A_TIME):
        several = inputs.comparisons[start : start + _AT_A_TIME]
        found = reader.too_long(several, view=view)
        refused = {id(each.comparison) for each in found}
        dropped |= {start + place for place, one in enumerate(several) if id(one) in refused}
        reasons += found
    if len(reasons) == len(inputs.comparisons):
        raise DataError(f"every comparison is too long, nothing is left to score; the first: {reasons[0]}")
    kept = [index for index in range(len(inputs.comparisons)) if index not in dropped]
    place = {old: new for new, old in enumerate(kept)}
    positions = {
        name: [place[old] for old in members if old in place] for name, members in inputs.benchmarks.items()
    }
    lost = {name: len(members) - len(positions[name]) for name, members in inputs.benchmarks.items()}
    fewer = replace(inputs, comparisons=chosen(inputs.comparisons, kept), benchmarks=positions)
    return fewer, LeftOut(reasons, lost)
