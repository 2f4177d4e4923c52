"""Settings of methods from the command line: METHOD.FIELD=VALUE."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from prb_jax.errors import DataError, quote
from prb_jax.personal.few_shot.registry import method_named


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings of each method that is named.

    Args:
      texts: as "lore.bases=4,8": a value is a number or a word, or several of these with commas between them where the
        setting has several values.

    Raises:
      DataError: a text of another form, no such method or field, or a value that the method refuses.
    """
    given: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        name, dot, field = place.partition(".")
        if not (equals and dot and value):
            raise DataError(f"settings: expected METHOD.FIELD=VALUE, found {quote(text)}")
        default = {each.name: each.default for each in fields(method_named(name).settings)}
        if field not in default:
            close = get_close_matches(field, default, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise DataError(
                f"settings: {name} has no {quote(field)}: expected one of {', '.join(default)}{hint}"
            )
        own = given.setdefault(name, {})
        if field in own:
            raise DataError(f"settings: {place} is given twice")
        read = [_value(part) for part in value.split(",")]
        if not isinstance(default[field], tuple) and len(read) > 1:
            raise DataError(f"settings: {place}: expected one value, found {quote(value)}")
        own[field] = tuple(read) if isinstance(default[field], tuple) else read[0]
    return {name: method_named(name).settings(**own) for name, own in given.items()}


def _value(text: str) -> Any:
    """A number, true or false, or else the word itself."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, int | float | str | bool) else text
