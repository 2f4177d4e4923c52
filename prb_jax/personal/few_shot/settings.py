"""Checks of the settings of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from prb_jax.errors import DataError, quote


def check_numbers(
    settings: Any,
    *,
    above: Mapping[str, float] | None = None,
    least: Mapping[str, float] | None = None,
    most: Mapping[str, float] | None = None,
) -> None:
    """Raise one error for a setting that is not a number within its limits; of a tuple, each entry.

    Args:
      settings: a dataclass.
      above, least, most: limits by the name of the setting. Settings whose type is
        int must be whole numbers.

    Raises:
      DataError: names the setting, the value and the expectation.
    """
    rules = (
        ("above", above, lambda one, limit: one > limit),
        ("of at least", least, lambda one, limit: one >= limit),
        ("of at most", most, lambda one, limit: one <= limit),
    )
    kinds = {field.name: str(field.type) for field in fields(settings)}
    for words, limits, holds in rules:
        for name, limit in (limits or {}).items():
            value = getattr(settings, name)
            several = isinstance(value, tuple)
            whole = "int" in kinds[name]
            values: Sequence[Any] = value if isinstance(value, tuple) else (value,)
            for one in values or (None,):
                good = isinstance(one, int if whole else int | float) and not isinstance(one, bool)
                if not good or not holds(one, limit):
                    number = "whole number" if whole else "number"
                    expected = f"{number}s" if several else f"a {number}"
                    raise DataError(
                        f"{type(settings).__name__}.{name}: expected {expected} {words} {limit:g}, "
                        f"found {quote(value)}"
                    )


@dataclass(frozen=True, kw_only=True)
class FewShotSettings:
    """Settings of every method that chooses numbers on the validation part.

    Attributes:
      validation_shots: how many comparisons of each person of the validation part are adapted on while numbers are
        chosen; the losses of these counts are averaged. Not given: in a study its own numbers of shots, else 2 and 8.
    """

    validation_shots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.validation_shots:
            check_numbers(self, least={"validation_shots": 0})
