"""The judgements of an audit as they stand, by the responses of each item whichever of them was A; their export."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from prb_jax.auditing.database import SUBMITTED, Event
from prb_jax.auditing.folder import AuditFolder, read_folder
from prb_jax.auditing.items import (
    CRITERIA,
    Item,
    Judgement,
    is_rejected_first,
    is_swapped,
    read_judgement,
)
from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError, short_repr

LABELS: Final = ("chosen", "rejected")
"""What the responses of an item are called outside: the one with the higher label, and the other one."""


@dataclass(frozen=True)
class Judged:
    """One judgement.

    Attributes:
      item: that was judged.
      annotator: by name.
      showing: how often the annotator had judged the item before.
      swapped: whether response A was the one with the lower label.
      judgement: the answer.
      opened, at: when the item was given out and the judgement submitted, in seconds since 1970.
    """

    item: Item
    annotator: str
    showing: int
    swapped: bool
    judgement: Judgement
    opened: float
    at: float

    __repr__ = short_repr


@dataclass(frozen=True)
class AuditState:
    """An audit as it stands.

    Attributes:
      folder: of the audit.
      items: of the audit.
      judged: the judgements in their order, without the ones that were taken back.
      checks: the judgements of gold items, and of items that were judged before, as they were first submitted: who
        guesses that an item was a check cannot mend the answer.
      taken_back: how many judgements were taken back.
    """

    folder: AuditFolder
    items: Sequence[Item]
    judged: Sequence[Judged]
    checks: Sequence[Judged]
    taken_back: int

    __repr__ = short_repr


def read_state(path: str | Path) -> AuditState:
    """Return how an audit stands; it may be served meanwhile.

    Raises:
      RunError: there is no audit, or it was changed by hand.
      DataError: the data changed since the audit began.
    """
    folder = read_folder(path)
    database = folder.open_database(write=False)
    try:
        items, events = database.items(), database.events()
    finally:
        database.close()
    standing: dict[int, Event] = {}
    checks: dict[tuple[str, int, int], Event] = {}
    for event in events:
        if event.kind != SUBMITTED:
            del standing[event.task]
            continue
        standing[event.task] = event
        if event.showing or items[event.item - 1].kind == "gold":
            checks.setdefault((event.annotator, event.item, event.showing), event)
    seed = folder.inputs["seed"]
    judged, first = (
        [_judged(items[event.item - 1], event, seed) for event in some.values()]
        for some in (standing, checks)
    )
    return AuditState(folder, items, judged, first, sum(event.kind != SUBMITTED for event in events))


def _judged(item: Item, event: Event, seed: int) -> Judged:
    swapped = is_swapped(seed, item.id, event.annotator, event.showing)
    judgement = read_judgement(event.answer, swapped=swapped)
    return Judged(item, event.annotator, event.showing, swapped, judgement, event.opened, event.at)


def audit_export(folder: str | Path, *, out: str | Path) -> int:
    """Write the judgements of an audit so far, one a line in their order; it may be served meanwhile.

    A line holds: id, kind ("item" or "gold"), annotator, showing (0 for the first time), fit ("chosen", "rejected" or
    null for "can't tell"), quality (by criterion, of "chosen" and "rejected"), comment, a (which response was A), first
    (which response is the first category of the coefficients of agreement: drawn by lot for each item), user_id,
    subset, opened and submitted. Judgements that were taken back are left out. In a .csv, a text that a spreadsheet
    would take for a formula has an apostrophe in front.

    Args:
      folder: of the audit.
      out: a file that ends in .jsonl or .csv.

    Returns:
      How many judgements there are.

    Raises:
      RunError: the name has another end, the file cannot be written, or the audit was changed by hand.
      DataError: the data changed since the audit began.
    """
    path = Path(out)
    if path.suffix not in (".jsonl", ".csv"):
        raise RunError(f"{path}: expected a name that ends in .jsonl or .csv")
    state = read_state(folder)
    seed = state.folder.inputs["seed"]
    rows = [_row(judged, rejected_first=is_rejected_first(seed, judged.item.id)) for judged in state.judged]
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        text = _csv(rows)
    with writing(path), whole_file(path) as file:
        file.write(text.encode())
    return len(rows)


def _row(judged: Judged, *, rejected_first: bool) -> dict[str, Any]:
    judgement = judged.judgement
    return {
        "id": judged.item.id,
        "kind": judged.item.kind,
        "annotator": judged.annotator,
        "showing": judged.showing,
        "fit": None if judgement.fit is None else LABELS[judgement.fit],
        "quality": {name: dict(zip(LABELS, judgement.quality[name], strict=True)) for name in CRITERIA},
        "comment": judgement.comment,
        "first": LABELS[int(rejected_first)],
        "a": LABELS[int(judged.swapped)],
        "user_id": judged.item.shown["user_id"],
        "subset": judged.item.shown["subset"],
        "opened": _time(judged.opened),
        "submitted": _time(judged.at),
    }


def _csv(rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    names = ["id", "kind", "annotator", "showing", "fit"]
    names += [f"{name}_{side}" for name in CRITERIA for side in LABELS]
    names += ["comment", "a", "first", "user_id", "subset", "opened", "submitted"]
    writer = csv.DictWriter(file, names, extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        ratings = {f"{name}_{side}": row["quality"][name][side] for name in CRITERIA for side in LABELS}
        cells = row | ratings
        writer.writerow({name: _no_formula(value) for name, value in cells.items()})
    return file.getvalue()


def _no_formula(value: Any) -> Any:
    """A cell that no spreadsheet computes: annotators and data may hold any text."""
    formula = isinstance(value, str) and (
        value[:1] in ("\t", "\r", "\n") or value.lstrip()[:1] in tuple("=+-@")
    )
    return f"'{value}" if formula else value


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
