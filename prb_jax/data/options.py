"""What users choose, as fields of dataclasses: the meaning, the default and the values of a choice stand at its field.

The command line makes its flags from these fields (`prb_jax/commands/arguments.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from prb_jax.errors import PrbError, quote

_OPTION = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a user has to know of a field.

    Attributes:
      default: where nothing is chosen.
      shown: the value in a usage, as "N"; "TEXT ..." for several.
      about: the meaning.
      choices: the values that there are; () where there are others.
      low: the least of whole numbers.
      real: whether it is a number with a fraction.
      flag: its name on the command line, where it is another one.
    """

    default: Any
    shown: str
    about: str
    choices: Sequence[str] = ()
    low: int | None = None
    real: bool = False
    flag: str | None = None


def option(default: Any, shown: str, about: str, **more: Any) -> Any:
    """Return a field of a dataclass; arguments are the attributes of :class:`Option`."""
    return field(
        default=default, metadata={_OPTION: Option(default=default, shown=shown, about=about, **more)}
    )


def options_of(kind: type) -> dict[str, Option]:
    """Return the fields of a dataclass that users choose, by name."""
    return {item.name: item.metadata[_OPTION] for item in fields(kind) if _OPTION in item.metadata}


def check_whole_numbers(chosen: Any, *, error: type[PrbError]) -> None:
    """Raise the error for a number of a dataclass that is not whole, or out of its range; absent ones may be None."""
    for name, found in options_of(type(chosen)).items():
        value = getattr(chosen, name)
        if found.low is None or value is None or isinstance(value, tuple):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not found.low <= value < 2**31:
            raise error(f"{name}: expected a whole number of at least {found.low}, found {quote(value)}")
