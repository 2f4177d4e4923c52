"""Options: fields of frozen dataclasses with help text, range and effect.

These fields define flags and help of the command line (`prb_jax/commands/arguments.py`), configs, overrides and
``--show-config`` (`prb_jax/records/config_files.py`), checks, and the record of a run.
"""

from __future__ import annotations

import dataclasses
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from prb_jax.errors import DataError, PrbError, RunError, quote, short_repr

Effect = Literal["result", "contents", "none"]
_OPTION = "option"
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Metadata of a field that is an option."""

    meaning: str = ""  # help text, also for `--show-config`
    shown: str = (
        ""  # placeholder of the value in usage, e.g. "N"; "TEXT ..." for several values, "LOW HIGH" for two
    )
    flag: str | None = None  # name on the command line, if different
    choices: Sequence[str] = ()  # allowed values; taken from the type if this is a Literal
    # least, above, most, below: bounds of a number
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    # noun for a required value in messages, e.g. "a file or data set": see :func:`check_given`
    required: str = ""
    # "result": the value decides the result; "contents": the contents of the named file do; "none": no effect
    effect: Effect = "result"
    # default and type of the field
    default: Any = None
    type: Any = str

    @property
    def kind(self) -> Any:
        """Type of a value other than None: X for `X | None`."""
        return optional_type(self.type) or self.type

    def allows(self, number: float) -> bool:
        """Return True if a number is within the bounds."""
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def fault(self, value: Any) -> str:
        """Return a phrase for the expected value; "" if the given value is allowed."""
        optional = optional_type(self.type) is not None
        if value is None and optional:
            return ""
        if self.choices:
            return "" if value in self.choices else f"one of {', '.join(self.choices)}"
        if self.kind not in (int, float):
            return ""
        kind, word = (numbers.Integral, "a whole number") if self.kind is int else (numbers.Real, "a number")
        if isinstance(value, kind) and not isinstance(value, bool):
            expected = "" if self.allows(value) else self.bounds  # pyright: ignore[reportArgumentType]
        else:
            expected = f"{word}, {self.bounds}" if self.bounds else word
        return f"{expected}, or None" if expected and optional else expected

    @property
    def bounds(self) -> str:
        """Bounds as a phrase."""
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        words = {
            "at least": self.least,
            "more than": self.above,
            "at most": self.most,
            "less than": self.below,
        }
        return " and ".join(f"{word} {bound:.10g}" for word, bound in words.items() if bound is not None)


def option(default: Any, meaning: str, shown: str = "", **more: Any) -> Any:
    """Return a dataclass field that is an option; arguments are the attributes of :class:`Option`."""
    return field(default=default, metadata={_OPTION: Option(meaning=meaning, shown=shown, **more)})


def section(kind: Callable[[], Any]) -> Any:
    """Return a dataclass field that is a section, a dataclass of options."""
    return field(default_factory=kind, metadata={_OPTION: Option()})


def same_option(kind: type, name: str, **changes: Any) -> Any:
    """Return a copy of another dataclass's field, with changed attributes of its :class:`Option`."""
    (item,) = (item for item in fields(kind) if item.name == name)
    default = changes.pop("default", item.default)
    return field(default=default, metadata={_OPTION: replace(item.metadata[_OPTION], **changes)})


class Options:
    """Base class that checks a dataclass of options; ``class Name(Options, prefix="lora.", error=DataError)``.

    Raises:
      PrbError: (class `error`) A value is out of range; the message names the key.
    """

    prefix: ClassVar[str] = ""
    error: ClassVar[type[PrbError]] = DataError

    def __init_subclass__(cls, prefix: str = "", error: type[PrbError] | None = None) -> None:
        cls.prefix, cls.error = prefix or cls.prefix, error or cls.error
        if "__repr__" not in vars(cls):
            cls.__repr__ = short_repr

    def __post_init__(self) -> None:
        for name, known in options_of(type(self), sections=False).items():
            object.__setattr__(self, name, choice_named(getattr(self, name), known.choices))
            expected = known.fault(getattr(self, name))
            self.check(name, not expected, expected)

    def check(self, name: str, ok: bool, expected: str) -> None:
        """Raise the error of this class unless `ok`."""
        if not ok:
            found = quote(getattr(self, name))
            raise self.error(f"{self.prefix}{name}: expected {expected}, found {found}")


def options_of(kind: type, *, sections: bool = True) -> dict[str, Option]:
    """Return every option of a dataclass by its key; options of sections have dotted keys, or are left out."""
    known: dict[str, Option] = {}
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint, here = hints[item.name], item.metadata.get(_OPTION)
        if here is None:
            continue
        if not (dataclasses.is_dataclass(hint) and isinstance(hint, type)):
            choices = here.choices or choices_of(hint)
            default = None if item.default is dataclasses.MISSING else item.default
            known[item.name] = replace(here, default=default, type=hint, choices=choices)
        elif sections:
            known |= {f"{item.name}.{key}": inner for key, inner in options_of(hint).items()}
    return known


def check_given(settings: Any, *, but: Sequence[str] = ()) -> None:
    """Check that settings have all required values, except the keys in `but`, which the caller provides.

    Raises:
      RunError: A required value is missing; the message names the key.
    """
    for key, known in options_of(type(settings), sections=False).items():
        if known.required and key not in but and not getattr(settings, key):
            raise RunError(
                f"config key '{key}': expected {known.required}, found none: add {key}={known.shown}"
            )


def from_flat(kind: Callable[..., Made], values: Mapping[str, Any], *, prefix: str | None = None) -> Made:
    """Build a dataclass of options and sections from values by name; a value can also be a whole section.

    Other values are ignored. With a prefix (which can be empty), names begin with it and are dotted, e.g. "lora.rank".
    """
    given = {}
    for item in fields(kind):  # pyright: ignore[reportArgumentType]
        key, inner = f"{prefix or ''}{item.name}", item.default_factory
        if key in values:
            given[item.name] = values[key]
        elif isinstance(inner, type) and dataclasses.is_dataclass(inner):
            given[item.name] = from_flat(inner, values, prefix=None if prefix is None else f"{key}.")
    return kind(**given)


def refuse_given(given: Mapping[str, Any], decided: str) -> None:
    """Raise RunError for given options without effect; `decided` is the reason."""
    if named := [name for name, value in given.items() if value is not None]:
        raise RunError(f"{', '.join(named)}: {decided}; remove {'it' if len(named) == 1 else 'them'}")


def optional_type(hint: Any) -> Any:
    """Return the type X of `X | None`, or None for other types."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        return inner[0] if len(inner) == 1 and len(inner) < len(get_args(hint)) else None
    return None


def choice_named(value: Any, choices: Sequence[str]) -> Any:
    """Return the choice that an object names, e.g. "float32" of `jnp.float32`; return other values unchanged."""
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) and name in choices and not isinstance(value, str) else value


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values of a Literal, optional or not; () for other types."""
    hint = optional_type(hint) or hint
    return get_args(hint) if get_origin(hint) is Literal else ()


def flat_settings(settings: Any) -> dict[str, Any]:
    """Return plain values by dotted names."""
    return dict(flat_values(dataclasses.asdict(settings)))


def flat_values(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted names and values of nested mappings."""
    flat = []
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        flat += flat_values(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return flat
