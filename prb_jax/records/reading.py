"""Read JSON of untrusted files, within bounds.

Depth and size are bounded, because later code would fail on such values without naming the file. A duplicate field is
an error, because one of its values would be lost. So is a non-finite number, which is invalid JSON and unusable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import PrbError, quote
from prb_jax.records.files import open_file, unique_fields

_LARGEST: Final = 100_000_000
_DEEPEST: Final = 64
_MOST_DIGITS: Final = 300
"""Maximum digits of an integer; slightly more do not fit a float."""


def read_json(
    path: Path, *, error: type[PrbError], hint: str = "", optional: bool = False, finite: bool = True
) -> Any:
    """Return the value in a JSON file.

    Args:
      path: File to read.
      error: Class of the error to raise.
      hint: Advice for the user, at the end of the message.
      optional: If True, return None for a missing file.
      finite: See `parse_json`.

    Raises:
      PrbError: (class `error`) The file cannot be read or is too large, or `parse_json` refuses it.
    """
    try:
        with open_file(path) as file:
            data = file.read(_LARGEST + 1)
    except OSError as failed:
        if optional and isinstance(failed, FileNotFoundError):
            return None
        raise error(f"{path}: cannot be read: {failed.strerror or failed}{_after(hint)}") from failed
    if len(data) > _LARGEST:
        raise error(f"{path}: expected at most {_LARGEST:,} bytes of JSON, found more{_after(hint)}")
    return parse_json(data, where=str(path), error=error, hint=hint, finite=finite)


def read_object(path: Path, *, error: type[PrbError], hint: str = "", finite: bool = True) -> dict[str, Any]:
    """Like `read_json`, but the file must contain an object."""
    value = read_json(path, error=error, hint=hint, finite=finite)
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}{_after(hint)}")
    return value


def parse_json(data: bytes, *, where: str, error: type[PrbError], hint: str = "", finite: bool = True) -> Any:
    """Parse JSON in UTF-8.

    Args:
      data: Bytes to parse.
      where: Start of error messages.
      error: Class of the error to raise.
      hint: Advice for the user, at the end of the message.
      finite: If False, accept NaN and infinity, which other programs write.

    Raises:
      PrbError: (class `error`) The data are invalid JSON or nested too deeply, a field occurs twice, or a number is
        infinite or NaN.
    """
    try:
        value = (_STRICT if finite else _LENIENT).decode(data.decode("utf-8"))
        if data.count(b"[") + data.count(b"{") > _DEEPEST:
            _check_depth(value)
    except RecursionError as failed:
        raise error(f"{where}: not valid JSON: nested too deeply{_after(hint)}") from failed
    except ValueError as failed:  # malformed, or bytes that are not UTF-8
        raise error(f"{where}: not valid JSON: {failed}{_after(hint)}") from failed
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"{quote(text, limit=40)} has more than {_MOST_DIGITS} digits")
    return int(text)


_LENIENT: Final = json.JSONDecoder(object_pairs_hook=unique_fields)
_STRICT: Final = json.JSONDecoder(
    object_pairs_hook=unique_fields, parse_constant=_finite, parse_float=_finite, parse_int=_whole
)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > _DEEPEST:
            raise RecursionError
        inside = (item.values() if isinstance(item, Mapping) else item for item in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]


def _after(hint: str) -> str:
    return f"; {hint}" if hint else ""
