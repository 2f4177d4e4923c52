"""A running audit: choose the next item for an annotator, keep drafts, and submit or take back judgements.

Every item goes to n people, with attention checks in between. One thread at a time may call it. Changes are written to
the database before they are counted here, so a killed process loses at most the unsubmitted answer.
"""

from __future__ import annotations

import hmac
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from prb_jax.building.auditing.database import SUBMITTED, Database, Event, OpenTask
from prb_jax.building.auditing.items import GOLD, ITEM, check_answer, is_swapped
from prb_jax.errors import PrbError
from prb_jax.records import fields
from prb_jax.serving.http_server import same_token

LONGEST_NAME: Final = 60
WHERE: Final = "the request"

LEFT_STEP: Final = 10
"""Step for the displayed number of items left: an exact number would not fall after a check, and so reveal it."""

LEAST_BETWEEN: Final = 5  # fewest other items before an item is shown again


class ClosedError(PrbError):
    """The task is no longer open: its judgement was submitted, or another task is open."""


@dataclass(frozen=True)
class CurrentItem:
    """View of an annotator: the open task (None if nothing is left to judge), its item with the responses as A and B,
    and the answer so far.

    ``left`` is the number of items that the annotator could still get, rounded up to ``LEFT_STEP``.
    """

    task: int | None
    item: Mapping[str, Any] | None
    draft: Mapping[str, Any] | None
    done: int
    left: int
    can_undo: bool


class Session:
    """State of one audit in one process."""

    def __init__(
        self,
        database: Database,
        settings: Mapping[str, Any],
        *,
        lease: float,
        secret: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the judgements so far from a database that is open for writing; ``settings`` are the audit's.

        ``lease`` is the time in seconds that an item stays reserved for an inactive annotator. ``secret`` is the key of
        the tokens; ``clock`` returns the seconds since 1970.
        """
        self._database, self._settings, self._lease, self._clock = database, settings, lease, clock
        self._secret = secret
        self.annotators = database.annotators()
        self._items = database.items()  # item number n is at index n - 1
        self._tasks = {task.number: task for task in database.tasks()}
        self._last_task = database.last_task()
        self._events: dict[str, list[Event]] = {}  # judgements of each annotator, without those taken back
        self._judged: Counter[int] = Counter()  # number of people who have judged each item
        for event in database.events():
            self._count(event)

    def join(self, name: object) -> tuple[str, str]:
        """Return the name and the token of an annotator; add the annotator if the name is new.

        Raises:
          DataError: the name is not valid.
        """
        text = " ".join(fields.text(name, WHERE, "name").split())
        if not 0 < len(text) <= LONGEST_NAME or not text.isprintable():
            fields.fail(
                WHERE, "name", f"expected 1 to {LONGEST_NAME} printable characters, found {len(text)}"
            )
        if text not in self.annotators:
            self._database.add_annotator(text)
            self.annotators.append(text)
        return text, self.token(text)

    def token(self, name: str) -> str:
        """Return the token of an annotator: the number, and a code that only this audit can make."""
        return f"{self.annotators.index(name) + 1}.{self._code(name)}"

    def annotator(self, token: str) -> str | None:
        """Return the annotator with this token, or None; tokens are compared in constant time."""
        number, _, code = token.partition(".")
        place = int(number) - 1 if number.isascii() and number.isdecimal() and len(number) < 7 else -1
        known = 0 <= place < len(self.annotators)
        name = self.annotators[place] if known else ""
        same = same_token(code, self._code(name))
        return name if known and same else None

    def _code(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), sha256).hexdigest()[:40]

    def current(self, annotator: str) -> CurrentItem:
        """Return the annotator's current view: the open item, or the next one."""
        now = self._clock()
        newest_first = [task for task in reversed(self._tasks.values()) if task.annotator == annotator]
        for task in newest_first:
            others = self._judged[task.item] + self._leased(annotator, now)[task.item]
            is_check = task.showing > 0 or self._kind(task.item) == GOLD
            needed = is_check or others < self._settings["per_item"]
            if task.draft is not None or task.expires > now or needed:
                self._hold(task, task.draft, now)
                return self._shown(annotator, self._tasks[task.number], now)
            self._database.remove_task(task.number)
            del self._tasks[task.number]
        if (chosen := self._check(annotator)) is None:
            # Items that others have judged or reserved come first, to complete as many items as possible at any time.
            # Ties are broken in a different order for every annotator.
            free = self._free(annotator, now)
            if not free:
                return self._shown(annotator, None, now)
            most = max(free.values())
            equal = [number for number, people in free.items() if people == most]
            rng = self._random("item", annotator, len(self._events.get(annotator, [])))
            chosen = rng.choice(equal), 0
        task = OpenTask(self._last_task + 1, annotator, *chosen, now, now + self._lease, None)
        self._database.add_task(task)
        self._last_task = task.number
        self._tasks[task.number] = task
        return self._shown(annotator, task, now)

    def keep(self, annotator: str, number: object, answer: object) -> None:
        """Store an answer that is not submitted yet.

        Raises:
          DataError: the answer is not valid.
          ClosedError: the task is not open.
        """
        draft = check_answer(answer, where=WHERE, complete=False)
        self._hold(self._task(annotator, number), draft, self._clock())

    def submit(self, annotator: str, number: object, answer: object) -> None:
        """Add a judgement; a repeated submission, from a client that lost the response, counts once.

        Raises:
          DataError: the answer is missing or incomplete.
          ClosedError: the task is not open.
        """
        whole = check_answer(answer, where=WHERE, complete=True)
        events = self._events.get(annotator)
        if events and events[-1].task == number and events[-1].answer == whole:
            return
        task = self._task(annotator, number)
        event = self._database.submit(task, whole, at=self._clock())
        del self._tasks[task.number]
        self._count(event)

    def undo(self, annotator: str) -> None:
        """Take back the last judgement of an annotator: its item is open again, with the answer.

        Raises:
          ClosedError: the annotator has judged nothing.
        """
        events = self._events.get(annotator)
        if not events:
            raise ClosedError("found no judgement to take back")
        last, now = events[-1], self._clock()
        held = (annotator, last.item, last.showing, now, now + self._lease, last.answer)
        again = OpenTask(self._last_task + 1, *held)
        event = self._database.take_back(last, again, at=now)
        self._last_task += 1
        self._tasks[again.number] = again
        self._count(event)

    def _count(self, event: Event) -> None:
        events, submitted = self._events.setdefault(event.annotator, []), event.kind == SUBMITTED
        if submitted:
            events.append(event)
        else:
            events.pop()
        if event.showing == 0:
            self._judged[event.item] += 1 if submitted else -1

    def _kind(self, item: int) -> str:
        return self._items[item - 1].kind

    def _check(self, annotator: str) -> tuple[int, int] | None:
        """Return a gold or repeated item and the number of its earlier showings if a check is due, else None."""
        past, every = self._events.get(annotator, []), self._settings["check_every"]
        if every < 1 or not past or past[-1].showing or self._kind(past[-1].item) == GOLD:
            return None  # never two in a row
        rng = self._random("check", annotator, len(past))
        if rng.random() * every >= 1:
            return None
        counts = Counter(event.item for event in past)
        again = [
            event.item
            for event in past[:-LEAST_BETWEEN]
            if counts[event.item] == 1 and self._kind(event.item) != GOLD
        ]
        gold = [item.number for item in self._items if item.kind == GOLD and not counts[item.number]]
        repeats = sum(event.showing > 0 for event in past)
        golds = sum(self._kind(event.item) == GOLD for event in past)
        choices = gold if gold and (golds <= repeats or not again) else again
        if not choices:
            return None
        item = rng.choice(choices)
        return item, counts[item]

    def _free(self, annotator: str, now: float) -> dict[int, int]:
        """Return the items that this annotator could still get, with the number of others who judged or hold each."""
        known = {event.item for event in self._events.get(annotator, [])}
        leased = self._leased(annotator, now)
        people = {
            item.number: self._judged[item.number] + leased[item.number]
            for item in self._items
            if item.kind == ITEM and item.number not in known
        }
        return {number: count for number, count in people.items() if count < self._settings["per_item"]}

    def _random(self, *parts: object) -> random.Random:
        return random.Random(repr((self._settings["seed"], *parts)))

    def _task(self, annotator: str, number: object) -> OpenTask:
        task = self._tasks.get(number) if type(number) is int else None
        if task is None or task.annotator != annotator:
            raise ClosedError("this item is no longer open: it was judged in another window, or taken back")
        return task

    def _hold(self, task: OpenTask, draft: dict[str, Any] | None, now: float) -> None:
        if draft == task.draft and task.expires - now > self._lease / 2:
            return
        held = replace(task, expires=now + self._lease, draft=draft)
        self._database.keep_draft(task.number, draft, expires=held.expires)
        self._tasks[task.number] = held

    def _leased(self, annotator: str, now: float) -> Counter[int]:
        """Count the other annotators who have reserved each item."""
        return Counter(
            task.item
            for task in self._tasks.values()
            if task.annotator != annotator and task.showing == 0 and task.expires > now
        )

    def _shown(self, annotator: str, task: OpenTask | None, now: float) -> CurrentItem:
        done = len(self._events.get(annotator, []))
        left = max(len(self._free(annotator, now)), task is not None)
        left = math.ceil(left / LEFT_STEP) * LEFT_STEP
        if task is None:
            return CurrentItem(None, None, None, done, left, done > 0)
        item = self._items[task.item - 1]
        a, b = item.shown["responses"]
        if is_swapped(self._settings["seed"], item.id, annotator, task.showing):
            a, b = b, a
        known = {name: item.shown[name] for name in ("prompt", "profile", "aspects", "narrative")}
        return CurrentItem(task.number, {**known, "a": a, "b": b}, task.draft, done, left, done > 0)
