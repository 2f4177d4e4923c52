"""The judgements of an audit in a file."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from prb_jax.auditing.answers import CRITERIA
from prb_jax.auditing.items import is_rejected_first
from prb_jax.auditing.judged import Judged, read_state
from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError

SIDES: Final = ("chosen", "rejected")
"""What the responses of an item are called outside: the one with the higher label, and the other one."""


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
    rows = [_row(each, rejected_first=is_rejected_first(seed, each.item.id)) for each in state.judged]
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
        "fit": None if judgement.fit is None else SIDES[judgement.fit],
        "quality": {name: dict(zip(SIDES, judgement.quality[name], strict=True)) for name in CRITERIA},
        "comment": judgement.comment,
        "first": SIDES[int(rejected_first)],
        "a": SIDES[int(judged.swapped)],
        "user_id": judged.item.shown["user_id"],
        "subset": judged.item.shown["subset"],
        "opened": _time(judged.opened),
        "submitted": _time(judged.at),
    }


def _csv(rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    names = ["id", "kind", "annotator", "showing", "fit"]
    names += [f"{name}_{side}" for name in CRITERIA for side in SIDES]
    names += ["comment", "a", "first", "user_id", "subset", "opened", "submitted"]
    writer = csv.DictWriter(file, names, extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        ratings = {f"{name}_{side}": row["quality"][name][side] for name in CRITERIA for side in SIDES}
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
