"""Check JSON values against types: a `TypedDict` describes the contents of a file."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import (
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from prb_jax.errors import PrbError, quote

_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    types.NoneType: "null",
}


def check_schema(value: Any, schema: Any, *, where: str, error: type[PrbError], hint: str = "") -> None:
    """Check that a JSON value has the types of a schema.

    Args:
      value: Value to check.
      schema: Any, bool, int, float (whole numbers too), str, list[T], tuple[T, ...] for a list, tuple[A, B] for a list
        of this length, dict[str, T], Literal, a union of these and None, or a TypedDict, which allows other fields too.
      where: Start of the message, such as the path of the file.
      error: Class of the error to raise.
      hint: Advice for the user, at the end of the message.

    Raises:
      PrbError: (class `error`) A value does not fit; the message names the field, the expected and the found value.
    """
    if not _fits(schema)(value):
        after = f"; {hint}" if hint else ""
        raise error(f"{where}: {_explain(value, schema, '')}{after}")


@cache
def _fits(schema: Any) -> Callable[[Any], bool]:
    """Return the test of a schema; cached, because files can have a million rows."""
    kind, parts = get_origin(schema) or schema, get_args(schema)
    if kind is Any:
        return lambda value: True
    if kind is Literal:
        return lambda value: isinstance(value, str | int) and value in parts
    if kind in (Union, types.UnionType):
        tests = [_fits(part) for part in parts]
        return lambda value: any(test(value) for test in tests)
    if is_typeddict(kind):
        fields = [(name, _fits(hint), required) for name, (hint, required) in fields_of(kind).items()]
        return lambda value: (
            type(value) is dict
            and all(test(value[name]) if name in value else not required for name, test, required in fields)
        )
    if kind is dict:
        test = _fits(parts[1])
        return lambda value: type(value) is dict and all(map(test, value.values()))
    if kind is list or (kind is tuple and parts[-1] is Ellipsis):
        test = _fits(parts[0])
        return lambda value: type(value) is list and all(map(test, value))
    if kind is tuple:
        tests = [_fits(part) for part in parts]
        return lambda value: (
            type(value) is list
            and len(value) == len(tests)
            and all(test(one) for test, one in zip(tests, value))
        )
    if kind is float:
        return lambda value: type(value) is float or type(value) is int
    return lambda value: type(value) is kind


def _explain(value: Any, schema: Any, field: str) -> str:
    """Return a phrase on a value that does not fit: the field, the expected and the found value."""
    kind, parts = get_origin(schema) or schema, get_args(schema)
    inside = f"{field}." if field else ""
    if kind in (
        Union,
        types.UnionType,
    ):  # the alternative with the value's type can locate the error inside the value
        alike = [part for part in parts if isinstance(value, dict | list) and _container(part) is type(value)]
        return _explain(value, alike[0], field) if alike else _wrong(value, schema, field)
    if is_typeddict(kind) and isinstance(value, dict):
        for name, (hint, required) in fields_of(kind).items():
            if name in value and not _fits(hint)(value[name]):
                return _explain(value[name], hint, f"{inside}{name}")
            if name not in value and required:
                return f"field '{inside}{name}': expected {_described(hint)}, found nothing"
    if kind is dict and isinstance(value, dict):
        name = next(name for name, one in value.items() if not _fits(parts[1])(one))
        return _explain(value[name], parts[1], f"{inside}{name}")
    if (kind is list or (kind is tuple and parts[-1] is Ellipsis)) and isinstance(value, list):
        place = next(place for place, one in enumerate(value) if not _fits(parts[0])(one))
        return _explain(value[place], parts[0], f"{field}[{place}]")
    return _wrong(value, schema, field)


def _wrong(value: Any, schema: Any, field: str) -> str:
    named = f"field '{field}': " if field else ""
    return f"{named}expected {_described(schema)}, found {'null' if value is None else quote(value)}"


def _container(schema: Any) -> Any:
    kind = get_origin(schema) or schema
    return dict if is_typeddict(kind) else kind


def _described(schema: Any) -> str:
    """Return a phrase for a schema in a message."""
    kind, parts = get_origin(schema) or schema, get_args(schema)
    if kind is Literal:
        return " or ".join(map(quote, parts))
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_described, parts)))
    if kind is tuple:
        return "a list" if parts[-1] is Ellipsis else f"a list of {len(parts)}"
    return "a value" if kind is Any else _NAMES[_container(schema)]


@cache
def fields_of(schema: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return the type of each field of a TypedDict, and whether the field is required."""
    fields = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        # `__required_keys__` ignores Required and NotRequired if annotations are strings.
        mark = get_origin(hint) if get_origin(hint) in (Required, NotRequired) else None
        is_required = schema.__total__ if mark is None else mark is Required
        fields[name] = (hint if mark is None else get_args(hint)[0], is_required)
    return fields
