"""Values of options: functions that convert texts, and lists with commas or blanks between the values."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from prb_jax.records.options import Option


def number_type(option: Option, kind: type = int) -> Callable[[str], Any]:
    """Return a function that converts a text to a number within an option's bounds."""
    whole = kind is int
    words = {1: "a number above 0", 0: "0 or more"} if whole and option.most is option.below is None else {}
    expected = words.get(-1 if option.least is None else int(option.least), option.bounds)

    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if whole else "a number"
            raise argparse.ArgumentTypeError(f"expected {what}, found {text!r}") from None
        if not option.allows(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
        return value

    return number


positive = number_type(Option(least=1))
not_negative = number_type(Option(least=0))


def separated(kind: Callable[[str], Any] | None) -> Callable[[str], list[Any]]:
    """Return a function that converts values separated by commas, e.g. "1,5,15"; a path with a comma is one value."""

    def values(text: str) -> list[Any]:
        parts = [text] if kind is None and os.path.exists(text) else text.split(",")
        try:
            if "" in parts:
                raise argparse.ArgumentTypeError("a value is empty")
            return parts if kind is None else [kind(part) for part in parts]
        except argparse.ArgumentTypeError as error:
            example = "a,b or a b" if kind is None else "1,5,15 or 1 5 15"
            raise argparse.ArgumentTypeError(f"{error}; several values: {example}") from None

    return values


class Listed(argparse.Action):
    """Keeps the values of all words of a flag, of which each may hold several."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        listed = [value for word in values for value in word]
        setattr(namespace, self.dest, tuple(listed) if isinstance(self.default, tuple) else listed)
