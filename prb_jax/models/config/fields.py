"""Typed access to the fields of a raw ``config.json``: every error names the file and the field."""

from collections.abc import Mapping
from typing import Any

from prb_jax.errors import CheckpointError, quote

MOST_LAYERS = 4096
"""Tables with an entry a layer are made before the layers of the weights are counted."""
LARGEST_INTEGER = 2**53  # a float holds all of them
LARGEST_NUMBER = 3.4028234663852886e38  # of float32
LARGEST_EPSILON = 1.0
"""A larger one would drown the values that a norm divides by."""


class FieldReader:
    """Reads fields of one JSON object and remembers which ones were read.

    Args:
      raw: the JSON object.
      where: what messages start with, e.g. ``/models/x/config.json``.
      prefix: put before field names, for an object inside another (``rope_parameters.``).

    In every method ``default`` is returned when the field is absent, or present and null; without
    a default an absent or null field raises :class:`CheckpointError`. A value of another type always
    raises. ``null_default`` separates the two cases for formats in which null has its own meaning.
    """

    def __init__(self, raw: Mapping[str, Any], *, where: str, prefix: str = "") -> None:
        self.raw = raw
        self.where = where
        self.prefix = prefix
        self.read: set[str] = set()

    def error(self, name: str, expected: str, *, found: Any = None) -> CheckpointError:
        """The error for field ``name``; ``found`` defaults to the value in the file."""
        if found is None and name not in self.raw:
            return CheckpointError(
                f"{self.where}: field '{self.prefix}{name}' is missing: expected {expected}"
            )
        value = self.raw.get(name) if found is None else found
        return CheckpointError(
            f"{self.where}: field '{self.prefix}{name}': expected {expected}, found {quote(value)}"
        )

    def has(self, name: str) -> bool:
        """Whether the field is present and not null; it then counts as read."""
        self.read.add(name)
        return self.raw.get(name) is not None

    def value(self, name: str) -> Any:
        """The field as it stands, or None."""
        self.read.add(name)
        return self.raw.get(name)

    def integer(
        self,
        name: str,
        *,
        default: int | None = None,
        minimum: int | None = 1,
        maximum: int = LARGEST_INTEGER,
    ) -> int:
        """An integer of at least ``minimum`` (no bound when None) and at most ``maximum``."""
        expected = "an integer" if minimum is None else f"an integer of at least {minimum}"
        value = self._present(name, default, expected)
        if isinstance(value, bool) or not isinstance(value, int) or (minimum is not None and value < minimum):
            raise self.error(name, expected)
        if value > maximum:
            raise self.error(name, f"{expected} and at most {maximum}")
        return value

    def optional_integer(
        self, name: str, *, default: int | None = None, minimum: int | None = 1
    ) -> int | None:
        """As :meth:`integer`, but an explicit null is None, and so is an absent field without default."""
        return self.integer(name, default=default, minimum=minimum) if self._given(name, default) else None

    def number(
        self,
        name: str,
        *,
        default: float | None = None,
        positive: bool = True,
        maximum: float = LARGEST_NUMBER,
    ) -> float:
        """A finite number of at most ``maximum`` (an integer is one too), by default above zero."""
        expected = "a number above 0" if positive else "a number"
        value = self._present(name, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.error(name, expected)
        if positive and value <= 0:
            raise self.error(name, expected)
        if abs(value) > maximum:
            raise self.error(name, f"{expected} and at most {maximum:g}")
        return float(value)

    def optional_number(self, name: str, *, default: float | None = None) -> float | None:
        """As :meth:`number`, but an explicit null is None, and so is an absent field without default."""
        return self.number(name, default=default) if self._given(name, default) else None

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._present(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """A non-empty string."""
        value = self._present(name, default, "a string")
        if not isinstance(value, str) or not value:
            raise self.error(name, "a string")
        return value

    def _given(self, name: str, default: Any) -> bool:
        self.read.add(name)
        return self.raw.get(name, default) is not None

    def _present(self, name: str, default: Any, expected: str) -> Any:
        self.read.add(name)
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(name, expected)
        return default
