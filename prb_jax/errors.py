"""The errors that a user can cause. Each message names the place, the value found and the value expected.

The command line prints these as one line and exits with status 2; anything else is a bug and
keeps its traceback. :func:`quote` shortens values of any size, also in the repr of a dataclass.
"""

import dataclasses
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

QUOTED = 200  # maximum characters of a value in a message

MESSAGE_LENGTH = 3000  # maximum characters of a message, without the mark of an omission

REPR_LENGTH = 1000  # maximum characters of a repr


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class PrbError(Exception):
    """Base class of all errors for bad input or an impossible request."""

    def __str__(self) -> str:
        text = printable(super().__str__())
        half = MESSAGE_LENGTH // 2  # names of fields, files and subsets may be of any length too
        return text if len(text) <= MESSAGE_LENGTH else f"{text[:half]} ... {text[-half:]}"


def printable(text: str) -> str:
    """Return the text with control characters escaped, except newline and tab: none may reach a terminal raw."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class DataError(PrbError):
    """A record, file or field of comparison data that cannot be used."""


class CheckpointError(PrbError):
    """A model folder, configuration, tokenizer or weight file that cannot be used."""


class MeshError(PrbError):
    """A device mesh that cannot be built, or an array that it does not divide."""


class RunError(PrbError):
    """An output folder that cannot be written, or that belongs to another run."""


def class_named(name: str) -> type[PrbError]:
    """Return the class of errors with this name, which another process has raised."""
    return next(kind for kind in (PrbError, *PrbError.__subclasses__()) if kind.__name__ == name)


class PrbWarning(UserWarning):
    """A problem that the user should know about while the work continues; the command line prints it as one line."""


class _Quoting(reprlib.Repr):
    """A repr that visits only the parts of a value that it shows; arrays appear as dtype and shape."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = limit

    def repr1(self, x: object, level: int) -> str:
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if shape and dtype is not None and not isinstance(x, type):
            return f"{dtype}[{', '.join(map(str, shape))}]"
        return super().repr1(x, level)  # pyright: ignore[reportArgumentType]


def quote(value: object, *, limit: int = QUOTED) -> str:
    """Return the repr of a value in at most ``limit`` characters; a longer repr loses its middle."""
    text = _Quoting(limit).repr(value)
    return text if len(text) <= limit else f"{text[: limit - 13]}...{text[-10:]}"


def refuse_unknown(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first keyword of a call that the function ``name`` does not have, with the nearest."""
    from difflib import get_close_matches

    names = list(known)
    for word in given:
        if word not in names:
            near = get_close_matches(word, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{name}() got an unexpected keyword argument {word!r}{hint}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the next if the first ends with a colon.

    An error without a message gives the name of its type.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, e.g. "1 post" and "2,000 posts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """Return the first names separated by commas, and the number of further names."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def short_repr(self: object) -> str:
    """Return a short ``__repr__`` for a dataclass: fields without a value, and fields with their defaults, are left
    out, and the others are quoted, in at most `REPR_LENGTH` characters."""
    fields = {
        field.name: getattr(self, field.name)
        for field in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        if field.repr and not _is_left_out(field, getattr(self, field.name))
    }
    limit = max(40, min(QUOTED, REPR_LENGTH // max(len(fields), 1) - 15))
    shown = [f"{name}={quote(_rounded(value), limit=limit)}" for name, value in fields.items()]
    text = f"{type(self).__name__}({', '.join(shown)})"
    return text if len(text) <= REPR_LENGTH else f"{text[: REPR_LENGTH - 4]}...)"


def _rounded(value: object) -> object:
    """Return a float with six digits, also inside a list or tuple of floats."""
    if type(value) is float:
        return float(f"{value:.6g}")
    if isinstance(value, list | tuple) and value and all(type(one) is float for one in value):
        rounded = list(map(_rounded, value))
        return rounded if isinstance(value, list) else tuple(rounded)
    return value


def _is_left_out(field: dataclasses.Field[Any], value: object) -> bool:
    if value is None or (type(value) in (tuple, list, dict) and not value):
        return True
    if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(value):
        return value == field.default_factory()
    plain = isinstance(value, str | int | float | tuple) and type(value) is type(field.default)
    return plain and value == field.default


def public_dir(self: object) -> list[str]:
    """Return a ``__dir__`` without private names, for completion by the tab key."""
    return [name for name in object.__dir__(self) if not name.startswith("_") or name.startswith("__")]
