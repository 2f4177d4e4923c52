"""Which methods a study compares and with which settings, as the command line names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final

from prb_jax.errors import DataError, RunError, quote
from prb_jax.personal.few_shot.backbone import TRAINS
from prb_jax.personal.few_shot.protocol import Method
from prb_jax.personal.few_shot.registry import method_named, method_names
from prb_jax.study.results import POOLED, STRONG

ALL: Final = "all"


@dataclass(frozen=True)
class StudyMethods:
    """The methods of a study.

    Attributes:
      methods: in the order of its tables.
      named: those that must be possible; others are left out where the data lack what they need.
      left_out: of "all", with the reason.
    """

    methods: list[Method]
    named: frozenset[str]
    left_out: dict[str, str]


def choose_methods(names: str | Sequence[str]) -> StudyMethods:
    """Return the methods of a study: those that are named, or "all"; pooled and offset are always among them.

    "all" leaves out the methods that train the backbone, unless they are named beside it.

    Raises:
      RunError: a name is given twice.
      DataError: there is no such method.
    """
    parts = [part for name in ([names] if isinstance(names, str) else names) for part in name.split(",")]
    if twice := [name for place, name in enumerate(parts) if name in parts[:place]]:
        raise RunError(f"methods: {twice[0]} is given twice")
    named = [method_named(name).name for name in parts if name != ALL]
    every = list(method_names()) if ALL in parts else []
    slow = {name for name in every if TRAINS in method_named(name).needs} - set(named)
    return StudyMethods(
        methods=[
            method_named(name) for name in dict.fromkeys([POOLED, STRONG, *named, *every]) if name not in slow
        ],
        named=frozenset(named),
        left_out={
            name: f"trains the backbone, which takes long; name it to have it: --methods {ALL},{name}"
            for name in sorted(slow)
        },
    )


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings of each method that is named.

    Args:
      texts: as "lore.bases=4,8": a value is a number or a word, or several of these with commas between them where the
        setting has several values.

    Raises:
      DataError: a text of another form, no such method or field, or a value that the method refuses.
    """
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        name, dot, field = place.partition(".")
        if not (equals and dot and value):
            raise DataError(f"settings: expected METHOD.FIELD=VALUE, found {quote(text)}")
        default = {setting.name: setting.default for setting in fields(method_named(name).settings)}
        if field not in default:
            close = get_close_matches(field, default, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise DataError(
                f"settings: {name} has no {quote(field)}: expected one of {', '.join(default)}{hint}"
            )
        if field in settings.setdefault(name, {}):
            raise DataError(f"settings: {place} is given twice")
        values = [_value(part) for part in value.split(",")]
        if not isinstance(default[field], tuple) and len(values) > 1:
            raise DataError(f"settings: {place}: expected one value, found {quote(value)}")
        settings[name][field] = tuple(values) if isinstance(default[field], tuple) else values[0]
    return {name: method_named(name).settings(**chosen) for name, chosen in settings.items()}


def _value(text: str) -> Any:
    """A number, true or false, or else the word itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | str | bool) else text
