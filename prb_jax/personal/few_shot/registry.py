"""The methods by name; a method's module is imported when it is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from prb_jax.errors import DataError, quote

if TYPE_CHECKING:
    from prb_jax.personal.few_shot.protocol import Method

METHODS = {
    "pooled": "pooled Bradley-Terry: one direction for everybody",
}
"""Each method's name and one line about it; the module of the same name in this folder holds ``METHOD``."""


def method_named(name: str) -> Method:
    """Return a method by its name.

    Raises:
      DataError: no method has this name.
    """
    if name not in METHODS:
        close = get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise DataError(f"unknown method {quote(name)}: expected one of {', '.join(METHODS)}{hint}")
    return import_module(f"prb_jax.personal.few_shot.{name}").METHOD
