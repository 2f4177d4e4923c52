"""Changed copies of the files of run folders: other types, odd numbers, lost and doubled parts, flipped bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD = (None, True, -1, 0, 1.5, 10**30, "x", "", [], {}, [1], {"a": [None]}, "../..", "\x1b[31m")
"""Values that take the place of one in a file of JSON."""

RAW = ("1e400", "-Infinity", "NaN", "1" + "0" * 400, '"\\ud800"')  # values that no strict file has
WHOLE = (b"", b"{}", b"[]", b"null", b'"x"', b"7", b"[[]]", b"\xff\xfe", b"[" * 200, b'{"a": 1, "a": 2}')


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value within JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any, *, remove: bool = False) -> Any:
    """Return JSON with another value at a place, or without it."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if remove and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new, remove=remove)
    return copy


def _json_text(value: Any, rng: random.Random) -> str:
    """One change of a value, as text."""
    place = rng.choice(list(places(value)))
    if place and rng.random() < 0.2:
        return json.dumps(changed(value, place, None, remove=True))
    if rng.random() < 0.15:
        return json.dumps(changed(value, place, "@here@")).replace('"@here@"', rng.choice(RAW), 1)
    return json.dumps(changed(value, place, rng.choice(ODD)))


def mutated(path: Path, rng: random.Random) -> bytes:
    """Return the bytes of a changed copy of a file, by its kind."""
    data = path.read_bytes()
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(WHOLE)
    if kind < 0.14:
        return data[: rng.randrange(len(data) + 1)]
    if path.suffix == ".json":
        return _json_text(json.loads(data), rng).encode()
    if path.suffix == ".jsonl":
        lines = data.splitlines()
        place = rng.randrange(len(lines))
        if kind < 0.2:
            return b"".join(line + b"\n" for line in [*lines[:place], *lines[place + 1 :]])
        if kind < 0.26:
            return b"".join(line + b"\n" for line in [*lines, lines[place]])
        lines[place] = _json_text(json.loads(lines[place]), rng).encode()
        return b"".join(line + b"\n" for line in lines)
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
