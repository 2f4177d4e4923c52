"""Strict checks of single values. Each error starts with ``where`` ("FILE:LINE") and names the field."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from prb_jax.errors import DataError, quote


def fail(where: str, name: str, message: str) -> NoReturn:
    """Raise the ``DataError`` for field ``name``."""
    raise DataError(f"{where}: field '{name}': {message}")


def found(value: object) -> str:
    """Return a value and its type, short enough for one line."""
    if value is None:
        return "null"
    return f"{quote(value)} ({type(value).__name__})"


def text(value: object, where: str, name: str) -> str:
    """Return ``value`` as a string that can be written as UTF-8."""
    if not isinstance(value, str):
        fail(where, name, "missing" if value is None else f"expected a string, found {found(value)}")
    if not value.isascii():
        # JSON can escape half of a surrogate pair, which no tokenizer and no file accepts.
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            fail(where, name, f"character {error.start} is a lone surrogate, which is not text")
    return value


def optional_text(value: object, where: str, name: str) -> str | None:
    """Like ``text``, but return None for an absent field."""
    return None if value is None else text(value, where, name)


def identifier(value: object, where: str, name: str) -> str:
    """Return a non-empty name; an integer becomes its digits."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return str(int(value))
    if not text(value, where, name):
        fail(where, name, "empty; expected a name")
    return str(value)


def optional_identifier(value: object, where: str, name: str) -> str | None:
    """Like ``identifier``, but return None for an absent field."""
    return None if value is None else identifier(value, where, name)


def number(value: object, where: str, name: str) -> float:
    """Return a finite number; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(where, name, f"expected a number, found {found(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        fail(where, name, f"expected a finite number, found {quote(value)}")
    return result


def sequence(value: object, where: str, name: str) -> list[Any] | tuple[Any, ...]:
    """Return ``value`` if it is a list or tuple."""
    if not isinstance(value, (list, tuple)):
        fail(where, name, f"expected a list, found {found(value)}")
    return value


def objects(value: object, where: str, name: str) -> Sequence[Any]:
    """Like ``sequence``, but convert an object of equally long lists, as in older data sets, to a list of objects."""
    if not isinstance(value, Mapping):
        return sequence(value, where, name)
    columns = list(value.values())
    if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return [dict(zip(value, items)) for items in zip(*columns)]
    return sequence(value, where, name)


def mapping(value: object, where: str, name: str) -> Mapping[str, Any]:
    """Return ``value`` if it is an object with named fields."""
    if not isinstance(value, Mapping):
        fail(where, name, f"expected an object, found {found(value)}")
    return value


def as_list(values: Iterable[Any] | None) -> Any:
    """Return an iterable as a list, and anything else unchanged, so ``sequence`` raises the error."""
    if values is None or isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return values
    return list(values)
