"""Checks of the settings of methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prb_jax.errors import DataError, quote


def check_numbers(
    settings: Any, *, above: dict[str, float] | None = None, least: dict[str, float] | None = None
) -> None:
    """Raise one error for a setting that is not a number above or at least its limit; of a tuple, each entry.

    Raises:
      DataError: names the setting, the value and the expectation.
    """
    for limits, words in ((above, "above"), (least, "of at least")):
        for name, limit in (limits or {}).items():
            value = getattr(settings, name)
            values: Sequence[Any] = value if isinstance(value, tuple) else (value,)
            for one in values or (None,):
                good = isinstance(one, int | float) and (one > limit if words == "above" else one >= limit)
                if not good:
                    several = "numbers" if isinstance(value, tuple) else "a number"
                    raise DataError(
                        f"{type(settings).__name__}.{name}: expected {several} {words} {limit:g}, found {quote(value)}"
                    )
