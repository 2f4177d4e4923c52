"""The job of one run: the comparisons as the model sees them, and everything that decides the result."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from prb_jax.errors import RunError, printable, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.platform.processes.sharing import on_first_process, process_count, process_index
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Items
from prb_jax.runs.evaluation import is_settled
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.inputs import (
    Inputs,
    warn_without_profiles,
)
from prb_jax.scoring.options import EvaluateOptions
from prb_jax.scoring.scorer import Scorer
from prb_jax.seams import get
from prb_jax.text.view import View
from prb_jax.version import computing_versions

if TYPE_CHECKING:
    from prb_jax.runs.parts import Part
    from prb_jax.scoring.prepared_tokens import StoredComparisons


class ComparisonTable:
    """The comparisons of a run in memory; `prb_jax.scoring.large_table.LargeTable` has columns without texts."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self._comparisons = comparisons

    def __len__(self) -> int:
        """Return the number of comparisons read so far."""
        return len(self._comparisons)

    def id(self, index: int) -> str:
        """Return the id of a comparison."""
        return self._comparisons[index].id

    @cached_property
    def ids(self) -> Sequence[str]:
        """Ids of all comparisons read so far."""
        return [one.id for one in self._comparisons]

    @cached_property
    def labels(self) -> Any:
        """Labels of each comparison, by its index."""
        return [list(one.labels or ()) for one in self._comparisons]

    def row(self, index: int, scores: Sequence[float], *, tokens: int = 0, truncated: Any = 0) -> ScoredRow:
        """Return the row of a comparison with its scores."""
        one = self._comparisons[index]
        return ScoredRow(one.id, one.subset, one.user_id, scores, self.labels[index], tokens, truncated)

    def told(self) -> int:
        """Return the number of comparisons with user information: a user id, a profile or hints."""
        return sum(one.has_user_info for one in self._comparisons)

    def advance(self, stop: int) -> None:
        """Read the comparisons before index `stop`; those in memory are read."""

    def complete(self) -> None:
        """Read all comparisons and warn of duplicates; those in memory are read."""


def table_of(comparisons: Items[Comparison]) -> ComparisonTable:
    """Return the table of a run's comparisons; those larger than memory enter it on their first read."""
    if comparisons.in_memory:
        return ComparisonTable(comparisons)
    return get("large data", "table").value(comparisons)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of one run: an evaluation, or one of its controls."""

    name: str
    scorer: Scorer
    inputs: Inputs
    table: ComparisonTable
    # inputs of the model, in the same order: comparisons, their prepared tokens, or the comparisons of a control
    shown: Items[Comparison]
    view: View
    decided: Mapping[str, Any]  # everything that decides the result, as in `run.json`
    notes: Mapping[str, Any] = field(default_factory=dict)  # other entries of `run.json`
    part: Part | None = None  # part of the batches, if the run is one of several jobs
    control: str | None = None  # name of the control, if the run is one

    __repr__ = short_repr


def open_job(scorer: Scorer, inputs: Inputs, options: EvaluateOptions) -> Job:
    """Return the job of an evaluation: all comparisons, or those that fit, as text or as prepared tokens.

    Raises:
      RunError: An option has no effect on this scorer, or there are hints and the scorer does not read a prompt.
      DataError: The view is impossible, or no comparison fits.
    """
    scorer.refuse_unused({**asdict(options.view), "batch_tokens": options.batch_tokens})
    identity = dict(scorer.identity())
    known_as = str(identity.pop("name", "model"))
    chosen, reader = scorer.choose_view(options.view), scorer.reader
    chosen.warn(known_as)
    view = chosen.view
    if options.too_long != "error":
        get("evaluation", "check too long").value(options.too_long, reader, view=view)
    warn_without_profiles(inputs.comparisons, reader, view=view)
    remarks = list(scorer.remarks(view))
    for remark in remarks if process_index() == 0 else ():
        print(f"prb: {printable(remark)}", file=sys.stderr)
    if inputs.hints and not scorer.has_prompt:
        extras = ", ".join(extra for extra in inputs.hints if extra != UPPER_BOUND)
        raise RunError(f"{extras}: {known_as} has no prompt to which they could be added")
    if options.folder is not None and on_first_process(functools.partial(is_settled, options.folder)):
        inputs.complete()  # so the digests are compared with the folder's record before rows are added
    decided = {
        # A moved folder is still the same model; a baseline has only a name.
        "model": identity or {"name": known_as},
        "data": inputs.to_json(whole=False),
        **view.shown,
        **(view.wording if scorer.has_heading else {}),
        "limit": options.limit,
        "seed": options.seed,
        "versions": computing_versions(plain=not scorer.has_weights),
        **({} if options.too_long == "error" else {"too_long": options.too_long}),
        **({"hints": inputs.hints} if inputs.hints else {}),
        **({} if options.part is None else {"part": options.part}),
    }
    if process_count() > 1:  # covers the tokenizer, and models passed as objects
        get("processes", "agreement").value(decided)
    notes = {
        "model": options.name or known_as,
        "data": list(inputs.sources),
        **({"overrides": chosen.overrides} if chosen.overrides else {}),
        **({"remarks": remarks} if remarks else {}),
    }
    tokens: StoredComparisons | None = None
    if inputs.prepared is not None and reader is not None:
        tokens = get("evaluation", "prepared").value(reader, inputs, view, options)
    if options.too_long == "skip":
        leave_out = get("evaluation", "leave out").value
        inputs = leave_out(inputs, reader, view=view, has_tokens=tokens is not None)
    return Job(
        name=options.name or known_as,
        scorer=scorer,
        inputs=inputs,
        table=table_of(inputs.comparisons) if tokens is None else tokens.table(),
        # Scorers with a reader accept prepared tokens too.
        shown=inputs.comparisons if tokens is None else cast("Items[Comparison]", tokens),
        view=view,
        decided=decided,
        notes=notes,
        part=None if options.part is None else get("parts", "parse").value(options.part),
    )
