"""The judgements of an audit as they stand, and their export."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from prb_jax.building.auditing.database import SUBMITTED, Event
from prb_jax.building.auditing.folder import AuditFolder, read_folder
from prb_jax.building.auditing.items import (
    CRITERIA,
    GOLD,
    SIDES,
    UNKNOWN,
    Item,
    is_rejected_first,
    is_swapped,
)
from prb_jax.errors import RunError, short_repr
from prb_jax.records.writing import write_once

LABELS: Final = ("chosen", "rejected")
"""What the responses of an item are called outside: the one with the higher label, and the other one."""


@dataclass(frozen=True)
class Judgement:
    """One judgement, by the responses of the item, whichever of them was A."""

    item: Item
    annotator: str
    showing: int  # how often the annotator had judged the item before
    swapped: bool  # whether response A was the one with the lower label
    fit: int | None  # 0 for the response with the higher label, 1 for the other one, None for "can't tell"
    # by criterion, the ratings of both responses in this order; None for "can't tell"
    quality: Mapping[str, Sequence[int | None]]
    comment: str
    opened: float  # when the item was given out, in seconds since 1970
    at: float  # when the judgement was submitted

    __repr__ = short_repr


@dataclass(frozen=True)
class AuditState:
    """An audit as it stands: its judgements in their order, without the ones that were taken back, which are counted.

    ``checks`` are the judgements of gold items, and of items that were judged before, as they were first submitted: who
    guesses that an item was a check cannot mend the answer.
    """

    folder: AuditFolder
    items: Sequence[Item]
    judged: Sequence[Judgement]
    checks: Sequence[Judgement]
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
        if event.showing or items[event.item - 1].kind == GOLD:
            checks.setdefault((event.annotator, event.item, event.showing), event)
    seed = folder.inputs["seed"]
    judged, first = (
        [_judged(items[event.item - 1], event, seed) for event in some.values()]
        for some in (standing, checks)
    )
    return AuditState(folder, items, judged, first, sum(event.kind != SUBMITTED for event in events))


def _judged(item: Item, event: Event, seed: int) -> Judgement:
    swapped, answer = is_swapped(seed, item.id, event.annotator, event.showing), event.answer
    order = SIDES[::-1] if swapped else SIDES
    quality = {
        criterion: [None if sides[side] == UNKNOWN else sides[side] for side in order]
        for criterion, sides in answer["quality"].items()
    }
    fit = None if answer["fit"] == UNKNOWN else order.index(answer["fit"])
    about = (item, event.annotator, event.showing, swapped)
    return Judgement(*about, fit, quality, answer["comment"], event.opened, event.at)


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
    rows = [_row(judged, seed=state.folder.inputs["seed"]) for judged in state.judged]
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        text = _csv(rows)
    write_once({path: text.encode()}, replace=True)
    return len(rows)


def _row(judged: Judgement, *, seed: int) -> dict[str, Any]:
    item = judged.item
    opened, submitted = (
        datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
        for seconds in (judged.opened, judged.at)
    )
    return {
        "id": item.id,
        "kind": item.kind,
        "annotator": judged.annotator,
        "showing": judged.showing,
        "fit": None if judged.fit is None else LABELS[judged.fit],
        "quality": {name: dict(zip(LABELS, judged.quality[name], strict=True)) for name in CRITERIA},
        "comment": judged.comment,
        "first": LABELS[int(is_rejected_first(seed, item.id))],
        "a": LABELS[int(judged.swapped)],
        "user_id": item.shown["user_id"],
        "subset": item.shown["subset"],
        "opened": opened,
        "submitted": submitted,
    }


def _csv(rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    ratings = {f"{name}_{side}": (name, side) for name in CRITERIA for side in LABELS}
    names = ["id", "kind", "annotator", "showing", "fit", *ratings, "comment", "a", "first"]
    names += ["user_id", "subset", "opened", "submitted"]
    writer = csv.writer(file)
    writer.writerow(names)
    for row in rows:
        cells = row | {column: row["quality"][name][side] for column, (name, side) in ratings.items()}
        # no cell is a formula, though annotators and data may hold any text
        for name, value in cells.items():
            if isinstance(value, str) and (
                value.startswith(("\t", "\r", "\n")) or value.lstrip().startswith(("=", "+", "-", "@"))
            ):
                cells[name] = f"'{value}"
        writer.writerow(cells[name] for name in names)
    return file.getvalue()
