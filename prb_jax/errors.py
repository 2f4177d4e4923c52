"""The errors a user can cause. Each message names the place, what was found and what was expected.

The command line prints these as one line and exits with status 2; anything else is a bug and
keeps its traceback. Values of any size are quoted by :func:`quote`, also where a dataclass shows itself.
"""

import dataclasses
import re
import reprlib
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

QUOTED = 200  # the most characters of a value in a message

MESSAGE_LENGTH = 3000  # the most characters of a message, but for the mark of what is left out

REPR_LENGTH = 1000  # the most characters of a repr


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class PrbError(Exception):
    """Base of every error that bad input or an impossible request can raise."""

    def __str__(self) -> str:
        text = printable(super().__str__())
        half = MESSAGE_LENGTH // 2  # names of fields, files and subsets may be of any length too
        return text if len(text) <= MESSAGE_LENGTH else f"{text[:half]} ... {text[-half:]}"


def printable(text: str) -> str:
    """Return the text with each control character but newline and tab escaped: none may reach a terminal raw."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class DataError(PrbError):
    """A record, file or field of comparison data that cannot be used."""


class CheckpointError(PrbError):
    """A model folder, configuration, tokenizer or weight file that cannot be used."""


class MeshError(PrbError):
    """A device mesh that cannot be built, or an array that it does not divide."""


class RunError(PrbError):
    """An output folder that cannot be written, or that belongs to another run."""


class PrbWarning(UserWarning):
    """Something that a user should know although the work goes on; the command line prints it as one line."""


EXTRAS = {
    "report": ("matplotlib",),
    "texts": ("rouge_score", "sacrebleu"),
    "build": ("datasketch",),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
    "redact": ("scrubadub",),
    "inspect": ("inspect_ai",),
}
"""The modules that an extra of `pyproject.toml` brings, which a plain `pip install prb-jax` does not."""


def lacking_extra(extra: str) -> str | None:
    """Return which packages of an extra are needed and not installed, and how they are; None if all are there."""
    missing = [module for module in EXTRAS[extra] if not _installed(module)]
    if not missing:
        return None
    lacks = "which is not installed" if len(missing) == 1 else "which are not installed"
    return f"needs {' and '.join(missing)}, {lacks}: pip install 'prb-jax[{extra}]'"


def need_extra(extra: str, what: str) -> None:
    """Check that the packages of an extra are installed.

    Raises:
      RunError: one is not; the message says which, for what, and how it is installed.
    """
    if lacking := lacking_extra(extra):
        raise RunError(f"{what}: {lacking}")


def _installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def has_extra(extra: str, what: str) -> bool:
    """Return whether the packages of an extra are installed; where they are not, warn that ``what`` is left out."""
    if lacking := lacking_extra(extra):
        warnings.warn(f"left out: {what}: {lacking}", PrbWarning, stacklevel=2)
    return lacking is None


class _Quoting(reprlib.Repr):
    """Never visits more of a value than it shows; arrays by their type and shape."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = limit

    def repr1(self, x: object, level: int) -> str:
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if shape and dtype is not None:
            return f"{dtype}[{', '.join(map(str, shape))}]"
        return super().repr1(x, level)  # pyright: ignore[reportArgumentType]


def quote(value: object, *, limit: int = QUOTED) -> str:
    """Return the repr of a value, at most ``limit`` characters of it, without its middle where it is longer."""
    text = _Quoting(limit).repr(value)
    return text if len(text) <= limit else f"{text[: limit - 13]}...{text[-10:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message with what it announces; the error's type if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as "1 post" and "2,000 posts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """Return the first names with commas between them, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def short_repr(self: object) -> str:
    """The ``__repr__`` of a dataclass that may hold much: each field quoted, at most `REPR_LENGTH` characters."""
    fields = [field for field in dataclasses.fields(self) if field.repr]  # pyright: ignore[reportArgumentType]
    limit = max(40, min(QUOTED, REPR_LENGTH // len(fields) - 15))
    shown = [f"{field.name}={quote(getattr(self, field.name), limit=limit)}" for field in fields]
    text = f"{type(self).__name__}({', '.join(shown)})"
    return text if len(text) <= REPR_LENGTH else f"{text[: REPR_LENGTH - 4]}...)"
