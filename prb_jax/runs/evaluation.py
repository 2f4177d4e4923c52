"""The run folder of `prb evaluate`, `prb judge` and the controls, during and after the run.

``scores.jsonl``    One row per comparison, in the order of completion; rewritten once at the end, in the order of the
                    input.
``blocks.jsonl``    Only while data larger than memory is read: see :mod:`prb_jax.runs.blocks`.
``computed.jsonl``  Until the run is finished: for each batch of a model one comparison of the batch, the tokens
                    computed, and the comparisons with equal token sequences on both sides. ``run.json`` gets the sums.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from prb_jax.errors import RunError, quote
from prb_jax.metrics.rows import RowTable, ScoredRow
from prb_jax.records.writing import write_json, writing
from prb_jax.runs.kind import RUN, RunFolder, RunKind, as_recorded
from prb_jax.runs.rows import Row, RowKind
from prb_jax.seams import get
from prb_jax.trees.tree import EQUAL_SIDES, EqualSides

if TYPE_CHECKING:
    from prb_jax.runs.blocks import Blocks

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


@dataclass(frozen=True)
class Computed:
    """Tokens and equal pairs that a model computed for a run."""

    tokens: int  # without padding
    equal_sides: EqualSides | None  # None if no comparison has equal sides


@dataclass(frozen=True)
class EvaluationFolder(RunFolder):
    """An open run folder of an evaluation."""

    # digests of the blocks read so far; None if the data is known as a whole
    blocks: Blocks | None

    def settle(self, inputs: Mapping[str, Any]) -> None:
        """Record in ``run.json`` the identity of the data, after it was read to its end.

        Raises:
          RunError: ``run.json`` records other data.
        """
        record, wanted = EVALUATION.read(self.path) or {"inputs": {}}, as_recorded(inputs)
        get("runs", "check inputs").value(self.path, *_compared(record["inputs"], wanted))
        if record["inputs"] != wanted:
            write_json(self.path / RUN, {**record, "inputs": wanted})
        _remove(self.path / BLOCKS)

    def append_computed(self, *, member: str, tokens: int, equal: Sequence[str]) -> None:
        """Append the tokens of the batch with this comparison, and its comparisons with equal sides, before its rows.

        A batch that is computed again appends the same line again, which counts once.
        """
        path = self.path / COMPUTED
        with writing(path), path.open("ab") as file:
            # The leading newline separates this line from a torn one of a killed session.
            file.write(b"\n" + json.dumps([member, tokens, *equal]).encode() + b"\n")

    def computed(self, ids: Iterable[str]) -> Computed | None:
        """Return the tokens and equal sides of all rows, for the comparisons' ids in order; None if the scorer does not
        report them."""
        path = self.path / COMPUTED
        if not path.exists():
            tokens, sides = self.record.get(COMPUTED_TOKENS), self.record.get(EQUAL_SIDES)
            return None if tokens is None else Computed(tokens, sides and EqualSides(**sides))
        with writing(path):
            lines = path.read_bytes().split(b"\n")[:-1]
        by_member: dict[str, int] = {}
        equal: set[str] = set()
        for line in lines:
            with contextlib.suppress(ValueError):  # empty or torn: a torn line's batch was computed again
                member, tokens, *names = json.loads(line)
                by_member[member] = tokens
                equal.update(names)
        sides = EqualSides.of(name for name in ids if name in equal) if equal else None
        return Computed(sum(by_member.values()), sides)

    def settle_computed(self, computed: Computed) -> None:
        """Store the sums in ``run.json``, and remove the file of single batches."""
        record = {**(EVALUATION.read(self.path) or {}), COMPUTED_TOKENS: computed.tokens}
        if computed.equal_sides is not None:
            record[EQUAL_SIDES] = asdict(computed.equal_sides)
        write_json(self.path / RUN, record)
        _remove(self.path / COMPUTED)


@contextlib.contextmanager
def open_evaluation(
    out: str | Path,
    *,
    inputs: Mapping[str, Any],
    session: Mapping[str, Any],
    notes: Mapping[str, Any],
    by_blocks: bool = False,
) -> Iterator[EvaluationFolder]:
    """Create the folder of an evaluation, or open it to continue.

    Args:
      out, inputs, session, notes: See `RunKind.open`.
      by_blocks: If True, the caller compares the data with the blocks if the folder does not identify the data yet.

    Raises:
      RunError: see `RunKind.open`; or the folder has scores, but not the blocks that identify their data.
    """

    def compared(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Any, Any]:
        both = _compared(recorded, wanted)
        if is_open(recorded) and not by_blocks and both[0] == both[1]:
            raise RunError(
                f"{out} holds a run that stopped before its data was read to the end, so it is unknown whether a "
                "prepared copy has the same contents: continue with the files that the run started with, or choose "
                "another folder with --out"
            )
        return both

    opened = EVALUATION.open(out, inputs, session=session, notes=notes, compared=compared)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(opened)
        unread = bool(run.file.rows) and is_open(run.record["inputs"])
        if not unread:
            _remove(run.path / BLOCKS)
        if not run.file.rows:
            _remove(run.path / COMPUTED)
        blocks = None
        if by_blocks:
            blocks = stack.enter_context(get("large data", "blocks").value(run.path))
        if unread and not (blocks and blocks.file.rows):
            raise RunError(
                f"{run.path / BLOCKS}: missing or empty, but scores exist; the file identifies their data: "
                "restore it, or choose another folder with --out"
            )
        yield EvaluationFolder(**vars(run), blocks=blocks)


def is_settled(out: str | Path) -> bool:
    """Return True if a folder holds scores of fully known data, which the caller must compare with its data first.

    Raises:
      RunError: the folder holds another kind of run.
    """
    path = Path(out)
    scored = (path / SCORES).is_file() and (path / SCORES).stat().st_size > 0
    record = EVALUATION.read(path) if scored else None
    return record is not None and not is_open(record["inputs"])


def _remove(path: Path) -> None:
    with writing(path):
        path.unlink(missing_ok=True)


def is_open(inputs: Mapping[str, Any]) -> bool:
    """Return True if the inputs of a run do not identify its data yet."""
    data = inputs.get("data")
    return isinstance(data, Mapping) and data.get("comparisons", 0) is None


def _compared(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the inputs to compare: what is open in one is taken from the other."""
    if not (is_open(recorded) or is_open(wanted)):
        return recorded, wanted
    filled = get("large data", "filled").value
    return filled(recorded, wanted), filled(wanted, recorded)
