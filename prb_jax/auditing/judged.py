"""The judgements of an audit as they stand, by the responses of each item, whichever of them was A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prb_jax.auditing.answers import Judgement, read_judgement
from prb_jax.auditing.database import SUBMITTED, Event
from prb_jax.auditing.folder import AuditFolder, read_folder
from prb_jax.auditing.items import Item, is_swapped
from prb_jax.errors import short_repr


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
class State:
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


def read_state(path: str | Path) -> State:
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
    return State(folder, items, judged, first, sum(event.kind != SUBMITTED for event in events))


def _judged(item: Item, event: Event, seed: int) -> Judged:
    swapped = is_swapped(seed, item.id, event.annotator, event.showing)
    judgement = read_judgement(event.answer, swapped=swapped)
    return Judged(item, event.annotator, event.showing, swapped, judgement, event.opened, event.at)
