"""Options of a verb with a config: each field of its settings says what it means, its range, and who uses it.

Everything about an option stands at its field: reading and overriding a config (`prb_jax.training.config`), checks, the
text of ``--show-config`` and the record of a run are made from it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from prb_jax.errors import DataError, quote

Effect = Literal["result", "contents", "none"]
_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field of settings says of itself.

    Attributes:
      meaning: in words, for `--show-config`.
      least, above, most, below: bounds of its number.
      used_by: the algorithms that use it; all where there are none.
      used_with: a key with which every algorithm uses it.
      needs: another key, without which this one has no effect, as "tuning=lora" or "kl.target", where any value but
        none and 0 will do.
      needs_text: the same in words; `needs` if not given.
      effect: whether the value decides the result, or names something that is known by its contents, or has none.
    """

    meaning: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    used_by: tuple[str, ...] = ()
    used_with: str = ""
    needs: str = ""
    needs_text: str = ""
    effect: Effect = "result"

    def allows(self, number: float) -> bool:
        """Tell whether a number is within the bounds."""
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        words = {
            "at least": self.least,
            "more than": self.above,
            "at most": self.most,
            "less than": self.below,
        }
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)


def option(default: Any, meaning: str, **rest: Any) -> Any:
    """A field of settings; the rest as of :class:`Option`."""
    return field(default=default, metadata={"option": Option(meaning=meaning, **rest)})


def section(kind: Callable[[], Any], **rest: Any) -> Any:
    """A field with a section of settings; the rest holds for those of its options that do not say it themselves."""
    return field(default_factory=kind, metadata={"option": Option(**rest)})


class Options:
    """Settings, or a section of them, whose fields are made by :func:`option`; each is checked.

    Raises:
      DataError: a value out of its range; names the key.
    """

    prefix: ClassVar[str] = ""

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = prefix or cls.prefix

    def __post_init__(self) -> None:
        check_choices(self, self.prefix)
        hints = get_type_hints(type(self))
        for item in fields(self):  # pyright: ignore[reportArgumentType]
            value, limits = getattr(self, item.name), option_of(item)
            if isinstance(value, int | float) and not isinstance(value, bool):
                or_none = "" if optional_type(hints[item.name]) is None else ", or None"
                self.check(item.name, limits.allows(value), f"{limits}{or_none}")

    def check(self, name: str, ok: bool, expected: str) -> None:
        """Raise DataError where a value is not as expected."""
        check_value(self, self.prefix, name, ok, expected)


def check_value(section: Any, prefix: str, name: str, ok: bool, expected: str) -> None:
    """Raise DataError where a value is out of its range; names the key, prefix first."""
    if not ok:
        raise DataError(f"{prefix}{name}: expected {expected}, found {quote(getattr(section, name))}")


def check_choices(section: Any, prefix: str) -> None:
    """Raise DataError where a value is none of the choices of its field."""
    for name, hint in get_type_hints(type(section)).items():
        choices, value = choices_of(hint), getattr(section, name)
        if choices and (value is not None or optional_type(hint) is None):
            check_value(section, prefix, name, value in choices, f"one of {', '.join(choices)}")


def option_of(item: dataclasses.Field[Any]) -> Option:
    """What a field says of itself; nothing, where it was not made by :func:`option`."""
    return item.metadata.get("option", Option())


def options_of(
    kind: type, prefix: str = "", inherited: Option | None = None
) -> Iterator[tuple[str, Any, Option]]:
    """Yield dotted key, annotated type and option of every option of settings."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint, key, known = hints[item.name], prefix + item.name, option_of(item)
        if inherited is not None:
            said_here = {
                name: value for name, value in vars(known).items() if value != getattr(Option(), name)
            }
            known = dataclasses.replace(inherited, **said_here)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from options_of(hint, f"{key}.", known)
        else:
            yield key, hint, known


def keys_with(kind: type, *effects: Effect) -> list[str]:
    """The keys of settings whose effect is one of these."""
    return [key for key, _, known in options_of(kind) if known.effect in effects]


def check_used(algorithm: str, kind: type, flat: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse options without effect: each of them must have its default.

    Raises:
      DataError: an option that the algorithm does not use (names those that do), or that needs another one.
    """
    for key, _, known in options_of(kind):
        value, default = flat[key], quote(defaults[key])
        if value == defaults[key]:
            continue
        users = known.used_by
        if users and algorithm not in users and (not known.used_with or flat[known.used_with] is None):
            raise DataError(
                f"{key}: expected nothing but its default {default} with algorithm={algorithm}, which "
                f"does not use it ({', '.join(users)} {'do' if len(users) > 1 else 'does'}), found {quote(value)}"
            )
        needed, _, wanted = known.needs.partition("=")
        if needed and (flat[needed] != wanted if wanted else flat[needed] in (None, 0, "none")):
            raise DataError(
                f"{key}: needs {known.needs_text or known.needs}: without it expected nothing but the default "
                f"{default}, found {quote(value)}"
            )


def optional_type(hint: Any) -> Any:
    """The type X of `X | None`, or None for other types."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        return inner[0] if len(inner) == 1 and len(inner) < len(get_args(hint)) else None
    return None


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values that a key with these alone may have; () for other keys."""
    hint = optional_type(hint) or hint
    return get_args(hint) if get_origin(hint) is Literal else ()


def value_text(value: Any) -> str:
    """Return a value as JSON, which YAML reads too."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def explained_settings(settings: Any) -> str:
    """Return every option on a line of its own, below its meaning; the whole is a YAML config."""
    return "\n".join(_lines(settings)) + "\n"


def meanings(kind: type) -> dict[str, str]:
    """Return the meaning of each option of a dataclass, by its field or its docstring."""
    listed = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = {}
    # A line that goes on is indented deeper than the name at its beginning.
    for entry in re.sub(r"\n\s+", " ", textwrap.dedent(listed)).splitlines():
        names, _, meaning = entry.partition(": ")
        found.update((name.strip(), meaning) for name in names.split(","))
    return found | {item.name: option_of(item).meaning for item in fields(kind) if option_of(item).meaning}


def _lines(section: Any, prefix: str = "") -> Iterator[str]:
    explained, hints = meanings(type(section)), get_type_hints(type(section))
    for item in fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            about = (inspect.getdoc(type(value)) or "").partition("\n\n")[0]
            yield from ("", *_comment(about))
            yield from _lines(value, f"{prefix}{item.name}.")
        else:
            choices = choices_of(hints[item.name])
            one_of = f" One of: {', '.join(choices)}." if choices else ""
            yield from ("", *_comment(explained[item.name] + one_of))
            yield f"{prefix}{item.name}: {value_text(value)}"


def _comment(text: str) -> list[str]:
    text = text if text.startswith("`") else text[:1].upper() + text[1:]
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
