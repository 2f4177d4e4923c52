"""The current judgements of an audit, and their export."""

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
"""Public names of an item's responses: the one with the higher label, and the other one."""


@dataclass(frozen=True)
class Judgement:
    """One judgement in terms of the item's responses, independent of which one was A."""

    item: Item
    annotator: str
    showing: int  # number of earlier judgements of the item by the annotator
    swapped: bool  # response A was the one with the lower label
    fit: int | None  # 0 for the response with the higher label, 1 for the other one, None for "can't tell"
    # by criterion, the ratings of both responses (higher label first); None for "can't tell"
    quality: Mapping[str, Sequence[int | None]]
    comment: str
    opened: float  # time when the item was assigned, in seconds since 1970
    at: float  # time when the judgement was submitted

    __repr__ = short_repr


@dataclass(frozen=True)
class AuditState:
    """State of an audit: its judgements in order, without those taken back, and the number of these.

    ``checks`` are judgements of gold items, and of items judged before, as first submitted: an annotator who guesses
    that an item was a check cannot correct the answer.
    """

    folder: AuditFolder
    items: Sequence[Item]
    judged: Sequence[Judgement]
    checks: Sequence[Judgement]
    taken_back: int

    __repr__ = short_repr


def read_state(path: str | Path) -> AuditState:
    """Return the state of an audit, which may be running.

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
    """Write the judgements of an audit so far, one per line in order; the audit may be running.

    A line has: id, kind ("item" or "gold"), annotator, showing (0 for the first time), fit ("chosen", "rejected" or
    null for "can't tell"), quality (by criterion, of "chosen" and "rejected"), comment, a (the response at A), first
    (the response that is the first category of the coefficients of agreement: random for each item), user_id,
    subset, opened and submitted. Judgements that were taken back are omitted. In a .csv file, texts that a spreadsheet
    would read as formulas begin with an apostrophe.

    Args:
      folder: Folder of the audit.
      out: File that ends in .jsonl or .csv.

    Returns:
      Number of judgements.

    Raises:
      RunError: the name ends differently, the file cannot be written, or the audit was changed by hand.
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
        # cells must not be formulas, and annotators and data may contain any text
        for name, value in cells.items():
            if isinstance(value, str) and (
                value.startswith(("\t", "\r", "\n")) or value.lstrip().startswith(("=", "+", "-", "@"))
            ):
                cells[name] = f"'{value}"
        writer.writerow(cells[name] for name in names)
    return file.getvalue()
