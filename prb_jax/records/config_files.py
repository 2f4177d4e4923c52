"""Convert config files, mappings and `key=value` overrides to settings (dataclasses of options), and back.

A config file is a Python file with a function ``get_config()`` that returns an ml_collections `ConfigDict` or a dict
with dotted or nested keys. Errors name the file and the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import runpy
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from prb_jax.errors import RunError, first_line, quote
from prb_jax.platform.paths import localised
from prb_jax.records.options import (
    Option,
    choices_of,
    flat_settings,
    flat_values,
    from_flat,
    optional_type,
    options_of,
)

if TYPE_CHECKING:
    from ml_collections import ConfigDict

Settings = TypeVar("Settings")

_NOT_READ = (".yaml", ".yml", ".toml")
_WIDTH, _INDENT = 80, "    "  # of --show-config
_TRUE, _FALSE, _NONE = ("true", "1", "yes"), ("false", "0", "no"), ("none", "null")

_CONFIGS = Path(__file__).resolve().parents[1] / "commands" / "configs"


def find_config(name: str | Path) -> Path:
    """Return the file of a config: a path, or the name of a packaged config, e.g. "bt_user_blind" or "rl/sft".

    Raises:
      RunError: Neither a file nor a packaged config has this name.
    """
    path = Path(name)
    if path.is_file():
        return path
    wanted = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    shipped = {file.relative_to(_CONFIGS).with_suffix(""): file for file in sorted(_CONFIGS.rglob("*.py"))}
    for config, file in shipped.items():
        if wanted.with_suffix("") in (config, Path(config.name)) and wanted.suffix in ("", ".py"):
            return file
    near = difflib.get_close_matches(wanted.stem, [config.name for config in shipped], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RunError(
        f"{name}: no such config file, nor a config of prb_jax ({', '.join(map(str, shipped))}){hint}"
    )


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return a phrase for an unknown key that suggests the nearest known key."""
    near = _nearest(key, list(known))
    return f"unknown config key {quote(key)}" + (f"; did you mean '{near}'?" if near else "")


def _nearest(key: str, known: list[str]) -> str | None:
    """Return the key that `key` abbreviates, first in the same section, or the one with the most similar spelling."""
    section, _, last = key.rpartition(".")
    ordered = sorted(known, key=lambda name: name.rpartition(".")[0] != section)
    for name in ordered:
        words = name.rpartition(".")[2].split("_")
        if len(words) > 1 and last == "".join(word[0] for word in words):
            return name
    beside = [name for name in known if section and name.rpartition(".")[0] == section]
    lasts = {name.rpartition(".")[2]: name for name in reversed(ordered)}
    for spelled, among in ((key, dict(zip(beside, beside))), (last, lasts), (key, dict(zip(known, known)))):
        if close := difflib.get_close_matches(spelled, among, n=1, cutoff=0.65):
            return among[close[0]]
    return None


def read_config(path: str | Path) -> Any:
    """Run a config file and return the result of its `get_config()`, a ConfigDict or a dict.

    Raises:
      RunError: The file is missing or not a Python file, raises an error, lacks `get_config`, or `get_config` returns
        another type.
    """
    from ml_collections import ConfigDict

    if Path(path).suffix in _NOT_READ:
        raise RunError(
            f"{path}: a config is a Python file: write the same keys and values as the dict that its `def "
            "get_config():` returns, as {'steps': 100, 'optimizer.b2': 0.99}, or on the command line as key=value"
        )
    file = find_config(path)
    try:
        namespace = runpy.run_path(str(file))
    except Exception as error:
        raise RunError(f"{file}: the config file fails: {type(error).__name__}: {error}") from error
    get_config = namespace.get("get_config")
    if not callable(get_config):
        raise RunError(f"{file}: expected a function get_config() in it, found none")
    try:
        config = get_config()
    except Exception as error:
        reason = first_line(error).strip("'\"")
        raise RunError(f"{file}: get_config() fails: {type(error).__name__}: {reason}") from error
    if not isinstance(config, ConfigDict | Mapping):
        raise RunError(
            f"{file}: get_config(): expected a ConfigDict or a dict, found {type(config).__name__}"
        )
    return config


def config_values(config: Any) -> Mapping[str, Any]:
    """Return the keys and values of a ConfigDict or a mapping."""
    return config if isinstance(config, Mapping) else config.to_dict()


def to_config_dict(settings: Any) -> ConfigDict:
    """Return settings as a locked ConfigDict: keys cannot be added, and values keep their types."""
    from ml_collections import ConfigDict, config_dict

    config, known = ConfigDict(), options_of(type(settings))
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            value = to_config_dict(value)
        elif optional_type(known[item.name].type) is not None:
            kind = known[item.name].kind
            plain = str if choices_of(kind) else get_origin(kind) or kind
            config[item.name] = config_dict.placeholder(plain)
        config[item.name] = value
    return config.lock()


def build_settings(kind: type[Settings], config: Any, overrides: Sequence[str] = ()) -> Settings:
    """Return checked settings of the class `kind`, a dataclass of options and sections.

    Args:
      config: Path of a config file or the name of a config of the package, a ConfigDict, a mapping of dotted or
        nested keys, or settings; None for the defaults.
      overrides: `key=value` with dotted keys, as on the command line: `optimizer.learning_rate=3e-4`,
        `mesh=none`, `lora.targets=q,v`. The last one wins.

    Raises:
      RunError: A key is unknown (the message suggests the nearest one), or a value has the wrong type.
      PrbError: A value is out of range.
    """
    known, values = options_of(kind), dict[str, Any]()
    if isinstance(config, kind):
        values = flat_settings(config)
    elif isinstance(config, str | Path):
        read = read_config(config)
        try:
            values = _flat(read, known)
        except RunError as error:
            raise RunError(f"{config}: {error}") from error
    elif config is not None:
        values = _flat(config, known)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise RunError(f"override {quote(text)}: expected key=value")
        key = key.removeprefix("config.").replace("-", "_")
        hint = _type_of(key, known)
        values[key] = _checked(key, _parse(key, value, hint), hint)
    return localised(from_flat(kind, values, prefix=""))


def _flat(config: Any, known: Mapping[str, Option]) -> dict[str, Any]:
    """Return the checked values of a config by dotted keys."""
    values: dict[str, Any] = {}
    for key, value in flat_values(config_values(config)):
        if key in values:
            raise RunError(f"config key '{key}' is given twice")
        values[key] = _checked(key, value, _type_of(key, known))
    return values


def explained_settings(settings: Any) -> str:
    """Return the text of a config file that sets every option, each below its help text."""
    lines = [
        '"""Every option with its meaning."""',
        "",
        f"from {type(settings).__module__} import default_config",
        "",
        "",
        "def get_config():",
        f"{_INDENT}config = default_config()",
        *_lines(settings, "config."),
        f"{_INDENT}return config",
    ]
    return "\n".join(lines) + "\n"


def _lines(part: Any, prefix: str) -> Iterator[str]:
    known = options_of(type(part), sections=False)
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if dataclasses.is_dataclass(value):
            yield from ("", *_comment((inspect.getdoc(type(value)) or "").partition("\n\n")[0]))
            yield from _lines(value, f"{prefix}{item.name}.")
        else:
            choices = known[item.name].choices
            one_of = f" One of: {', '.join(choices)}." if choices else ""
            yield from ("", *_comment(known[item.name].meaning + one_of))
            yield f"{_INDENT}{prefix}{item.name} = {value!r}"
    if prefix == "config.":
        yield ""


def _comment(text: str) -> list[str]:
    text = text if text.startswith("`") else text[:1].upper() + text[1:]
    start = f"{_INDENT}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def _type_of(key: str, known: Mapping[str, Option]) -> Any:
    if key in known:
        return known[key].type
    if any(name.startswith(f"{key}.") for name in known):
        raise RunError(f"config key '{key}' is a section: set one of its keys, as in '{key}.NAME=value'")
    raise RunError(unknown_key(key, known))


def _described(hint: Any) -> str:
    inner = optional_type(hint)
    if inner is not None:
        return f"{_described(inner)} or none"
    if choices := choices_of(hint):
        return " or ".join(choices)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "a list of texts")


def _wrong(key: str, hint: Any, found: Any) -> RunError:
    return RunError(f"config key '{key}': expected {_described(hint)}, found {quote(found)}")


def _parse(key: str, text: str, hint: Any) -> Any:
    """Convert text to the type of its key."""
    inner = optional_type(hint)
    if inner is not None:
        return None if text.strip().lower() in _NONE else _parse(key, text, inner)
    if get_origin(hint) is tuple:
        return tuple(item.strip() for item in text.strip("()[]").split(",") if item.strip())
    if hint is bool:
        lowered = text.strip().lower()
        if lowered not in _TRUE + _FALSE:
            raise _wrong(key, hint, text)
        return lowered in _TRUE
    if hint in (int, float):
        try:
            return hint(text.replace("_", ""))
        except ValueError:
            raise _wrong(key, hint, text) from None
    return text


def _checked(key: str, value: Any, hint: Any) -> Any:
    """Return the value in the type of its key: integers become floats and lists become tuples; nothing else changes."""
    inner = optional_type(hint)
    if inner is not None:
        return None if value is None else _checked(key, value, inner)
    if choices := choices_of(hint):
        if value not in choices:
            raise _wrong(key, hint, value)
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise _wrong(key, hint, value)
        return tuple(value)
    if hint is str and isinstance(value, Path):
        return str(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise _wrong(key, hint, value)
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _wrong(key, hint, value)
    return value
