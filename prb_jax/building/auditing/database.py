"""Database of an audit: SQLite in WAL mode with items, annotators, open tasks, and a log of judgements.

A judgement is a row of ``events`` and never changes: taking it back adds another row. Every row contains a digest of
itself and of the row before it, and ``meta`` contains the last digest. Rows that were changed, added or removed by hand
are therefore found and named.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NoReturn

from prb_jax.building.auditing.items import Item, items_digest
from prb_jax.errors import RunError, quote, short_repr

DATABASE: Final = "audit.db"
SUBMITTED: Final = "submitted"
TAKEN_BACK: Final = "taken back"

_APPLICATION: Final = 0x70726261  # "prba"
_FORMAT: Final = 1
_TABLES: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE items (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, shown TEXT NOT NULL);
CREATE TABLE annotators (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE tasks (number INTEGER PRIMARY KEY AUTOINCREMENT, annotator TEXT NOT NULL, item INTEGER NOT NULL,
  showing INTEGER NOT NULL, opened REAL NOT NULL, expires REAL NOT NULL, draft TEXT);
CREATE TABLE events (number INTEGER PRIMARY KEY, task INTEGER NOT NULL, annotator TEXT NOT NULL, item INTEGER NOT NULL,
  showing INTEGER NOT NULL, kind TEXT NOT NULL, answer TEXT NOT NULL, opened REAL NOT NULL, at REAL NOT NULL,
  digest TEXT NOT NULL);
"""
_FAST: Final = "PRAGMA synchronous = NORMAL"  # a killed process loses nothing
_DURABLE: Final = "PRAGMA synchronous = FULL"
_HINT: Final = "restore the file from a backup; nothing was changed"


@dataclass(frozen=True)
class OpenTask:
    """An item assigned to an annotator; fields in the order of the table.

    ``showing`` is the number of earlier judgements of the item by the annotator. At ``expires`` an unjudged item goes
    to somebody else (both times in seconds since 1970). ``draft`` is the answer so far, None before the first one.
    """

    number: int
    annotator: str
    item: int
    showing: int
    opened: float
    expires: float
    draft: dict[str, Any] | None

    __repr__ = short_repr


@dataclass(frozen=True)
class Event:
    """A judgement that was submitted or taken back at time ``at``; fields in the order of the table, see `OpenTask`.

    Events are numbered from 1. When a judgement is taken back, its new event repeats the answer.
    """

    number: int
    task: int
    annotator: str
    item: int
    showing: int
    kind: str
    answer: dict[str, Any]
    opened: float
    at: float

    __repr__ = short_repr


def make_database(path: Path, items: Sequence[Item], *, audit: str, settings: str) -> None:
    """Write a new database with these items, over an unfinished one of a killed process.

    The database contains the audit's id and the digest of its settings.

    Raises:
      RunError: the file cannot be written.
    """
    rows = [(item.number, item.id, item.kind, json.dumps(item.shown)) for item in items]
    meta = {"audit": audit, "settings": settings, "items": items_digest(rows), "events": "0", "digest": ""}
    with _explained(path):
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.executescript(
                f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_FORMAT}; BEGIN; {_TABLES}"
            )
            connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
            connection.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
            connection.execute("COMMIT")
        finally:
            connection.close()


class Database:
    """An open database; one thread at a time may call it."""

    def __init__(self, path: Path, *, audit: str, settings: str, write: bool) -> None:
        """Open and verify the database of this audit, with this digest of its settings; RunError if it is damaged. One
        process at a time may ``write``, while others read."""
        self.path = path
        if not path.is_file():
            raise RunError(f"{path}: no such file, but it contains the judgements of the audit: {_HINT}")
        with _explained(path):
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={'rw' if write else 'ro'}",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=10,
            )
        try:
            with _explained(path):
                if write:
                    self._connection.execute("PRAGMA journal_mode = WAL")
                    self._connection.execute(_FAST)
                self._connection.execute("BEGIN")  # check a consistent snapshot
                self._check(audit, settings)
                self._connection.execute("COMMIT")
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def annotators(self) -> list[str]:
        """Return the names of all annotators, in the order in which they joined."""
        return [name for (name,) in self._rows("SELECT name FROM annotators ORDER BY number")]

    def add_annotator(self, name: str) -> None:
        """Add an annotator, unless the name exists."""
        with self._writing() as cursor:
            cursor.execute("INSERT OR IGNORE INTO annotators (name) VALUES (?)", (name,))

    def tasks(self) -> list[OpenTask]:
        """Return the open tasks, in the order of their assignment."""
        rows = self._rows("SELECT * FROM tasks ORDER BY number")
        return [OpenTask(*row[:6], draft=None if row[6] is None else json.loads(row[6])) for row in rows]

    def last_task(self) -> int:
        """Return the highest task number ever used."""
        return max((number for (number,) in self._rows("SELECT seq FROM sqlite_sequence")), default=0)

    def add_task(self, task: OpenTask) -> None:
        """Add an open task."""
        with self._writing() as cursor:
            _insert_task(cursor, task)

    def keep_draft(self, number: int, draft: dict[str, Any] | None, *, expires: float) -> None:
        """Store the answer so far, and reserve the item until ``expires``."""
        text = None if draft is None else json.dumps(draft)
        with self._writing() as cursor:
            cursor.execute(
                "UPDATE tasks SET draft = ?, expires = ? WHERE number = ?", (text, expires, number)
            )

    def remove_task(self, number: int) -> None:
        """Remove a task that was not started."""
        with self._writing() as cursor:
            cursor.execute("DELETE FROM tasks WHERE number = ?", (number,))

    def submit(self, task: OpenTask, answer: dict[str, Any], *, at: float) -> Event:
        """Add a judgement and remove its task in one transaction."""
        about = (task.number, task.annotator, task.item, task.showing)
        with self._writing(durable=True) as cursor:
            cursor.execute("DELETE FROM tasks WHERE number = ?", (task.number,))
            return self._append(cursor, Event(0, *about, SUBMITTED, answer, task.opened, at))

    def take_back(self, event: Event, again: OpenTask, *, at: float) -> Event:
        """Record that a judgement was taken back, and open a new task for it, in one transaction."""
        with self._writing(durable=True) as cursor:
            _insert_task(cursor, again)
            return self._append(cursor, replace(event, kind=TAKEN_BACK, at=at))

    def _append(self, cursor: sqlite3.Cursor, event: Event) -> Event:
        """Add an event with the next number, and a digest of itself and of the previous event."""
        meta = dict(self._rows("SELECT name, value FROM meta"))
        event = replace(event, number=int(meta["events"]) + 1)
        row = tuple((vars(event) | {"answer": json.dumps(event.answer, sort_keys=True)}).values())
        digest = _event_digest(meta["digest"], row)
        cursor.execute(f"INSERT INTO events VALUES ({', '.join('?' * 10)})", (*row, digest))
        for name, value in (("digest", digest), ("events", str(event.number))):
            cursor.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))
        return event

    def items(self) -> list[Item]:
        """Return the items by number."""
        rows = self._rows("SELECT * FROM items ORDER BY number")
        return [Item(number, id, kind, json.loads(shown)) for number, id, kind, shown in rows]

    def events(self) -> list[Event]:
        """Return all events in order."""
        rows = self._rows("SELECT * FROM events ORDER BY number")
        return [Event(*row[:6], answer=json.loads(row[6]), opened=row[7], at=row[8]) for row in rows]

    def _rows(self, query: str) -> list[Any]:
        with _explained(self.path):
            return self._connection.execute(query).fetchall()

    @contextlib.contextmanager
    def _writing(self, *, durable: bool = False) -> Iterator[sqlite3.Cursor]:
        """Run the body as one transaction; with ``durable`` it also survives a power failure, but takes longer."""
        with _explained(self.path):
            cursor = self._connection.cursor()
            cursor.execute(_DURABLE if durable else _FAST)
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    cursor.execute("ROLLBACK")
                raise

    def _check(self, audit: str, settings: str) -> None:
        def refuse(what: str, hint: str = _HINT, *, path: Path = self.path) -> NoReturn:
            raise RunError(f"{path}: {what}; {hint}")

        (application,), (version,) = self._rows("PRAGMA application_id") + self._rows("PRAGMA user_version")
        if application != _APPLICATION:
            refuse("not a database of `prb audit`")
        if version != _FORMAT:
            refuse(f"format {version}", f"this version reads format {_FORMAT}")
        meta = dict(self._rows("SELECT name, value FROM meta"))
        names = {"audit", "settings", "items", "events", "digest"}
        if meta.keys() != names or not meta["events"].isdecimal():
            refuse("table meta was changed by hand")
        if meta["audit"] != audit:
            refuse(
                f"of another audit, {quote(meta['audit'])}",
                f"audit.json beside it has {quote(audit)}: put the two files of one audit together; nothing was "
                "changed",
            )
        if meta["settings"] != settings:
            changed = "the settings were changed by hand since the audit began"
            refuse(changed, path=self.path.with_name("audit.json"))
        if items_digest(self._rows("SELECT * FROM items ORDER BY number")) != meta["items"]:
            refuse("table items was changed by hand")
        before, known = "", {number for (number,) in self._rows("SELECT number FROM items")}
        rows = self._rows("SELECT * FROM events ORDER BY number")
        for place, row in enumerate(rows, start=1):
            digest = _event_digest(before, row[:-1])
            if row[0] != place or digest != row[-1] or row[3] not in known:
                refuse(f"table events: judgement {place} was changed, added or removed by hand")
            before = digest
        if (before, len(rows)) != (meta["digest"], int(meta["events"])):
            refuse(
                f"table events: {len(rows)} judgements, expected the {meta['events']} that were written: some were "
                "removed or added by hand"
            )


def _event_digest(before: str, row: Sequence[Any]) -> str:
    return sha256(json.dumps([before, *row]).encode()).hexdigest()


def _insert_task(cursor: sqlite3.Cursor, task: OpenTask) -> None:
    draft = None if task.draft is None else json.dumps(task.draft)
    row = (vars(task) | {"draft": draft}).values()
    cursor.execute("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?)", tuple(row))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the operating system into one clear RunError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        kept = "earlier judgements are kept"
        raise RunError(f"{path}: cannot be read or written: {error}; {kept}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise RunError(f"{path}: was changed by hand ({error}); {_HINT}") from error
