"""Configs of training runs: files, typed overrides, and checks that name the key.

The keys are those of `prb_jax.training.settings`. A YAML or TOML file has them dotted or nested; a Python file has a
function that gives an ml_collections `ConfigDict`:

    from prb_jax.training.config import default_config

    def get_config():
        config = default_config()
        config.method = "profile_context"
        config.optimizer.learning_rate = 3e-4
        return config
"""

from __future__ import annotations

import dataclasses
import math
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict, config_dict

from prb_jax.data.config_files import SUFFIXES, find_config, read_config_file, unknown_key
from prb_jax.errors import RunError, quote
from prb_jax.training.options import optional_type, options_of
from prb_jax.training.settings import TrainSettings

Config = str | Path | ConfigDict | Mapping[str, Any] | TrainSettings
Settings = TypeVar("Settings")

_TRUE, _FALSE, _NONE = ("true", "1", "yes"), ("false", "0", "no"), ("none", "null")


def default_config() -> ConfigDict:
    """Every option with its default. Keys cannot be added, and values keep their types."""
    return to_config_dict(TrainSettings())


def to_config_dict(settings: Any) -> ConfigDict:
    """Settings as a locked ConfigDict."""
    return _config_dict(settings).lock()


def read_config(path: str | Path) -> ConfigDict:
    """Run a Python config file and return the result of its `get_config()`.

    Raises:
      RunError: no such file; it fails, has no `get_config`, or that returns something else.
    """
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
        raise RunError(f"{file}: get_config() fails: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(config, ConfigDict):
        raise RunError(f"{file}: get_config(): expected a ConfigDict, found {type(config).__name__}")
    return config


def load_settings(
    config: Config | None, overrides: Sequence[str] = (), *, complete: bool = True, data_given: bool = False
) -> TrainSettings:
    """Return the checked settings of a config with overrides applied.

    Args:
      config: path of a config file or the name of a config of the package, a ConfigDict, a mapping of dotted or
        nested keys, or settings; None for the defaults.
      overrides: `key=value` with dotted keys, as on the command line: `optimizer.learning_rate=3e-4`,
        `mesh=none`, `lora.targets=q,v`. The last one wins.
      complete: a model and data must be given.
      data_given: the caller has the training data, so that the settings need not name any.

    Raises:
      RunError: an unknown key (naming the nearest one) or a wrong type.
      DataError: a value out of range.
    """
    settings = build_settings(TrainSettings, config, overrides)
    if not settings.model and complete:
        raise RunError(
            "config key 'model': expected a folder, a hub id or 'scratch', found none: add model=PATH"
        )
    if not settings.data and complete and not data_given:
        raise RunError("config key 'data': expected a file, folder or data set, found none: add data=PATH")
    return settings


def build_settings(kind: type[Settings], config: Any, overrides: Sequence[str] = ()) -> Settings:
    """Return settings of a kind, a dataclass whose fields are options or sections of them.

    Args:
      kind: of the settings.
      config, overrides: as of :func:`load_settings`, for this kind.

    Raises:
      RunError: as :func:`load_settings`.
    """
    types_by_key = {key: hint for key, hint, _ in options_of(kind)}
    if isinstance(config, str | Path):
        config = find_config(config)
    if isinstance(config, Path) and config.suffix in SUFFIXES:
        values = _read_values(config, types_by_key)
    else:
        if isinstance(config, Path):
            config = read_config(config)
        if isinstance(config, kind):
            config = to_config_dict(config)
        values = dict(_flat(config.to_dict() if isinstance(config, ConfigDict) else config or {}))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise RunError(f"override {quote(text)}: expected key=value")
        key = key.removeprefix("config.").replace("-", "_")
        values[key] = _parse(key, value, _type_of(key, types_by_key))
    checked = {key: _checked(key, value, _type_of(key, types_by_key)) for key, value in values.items()}
    return _build(kind, checked, prefix="")


def _read_values(path: Path, types_by_key: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a YAML or TOML file; a text is read as on the command line, as these know no `1e-4` or no null."""
    given = read_config_file(path)
    values = {}
    try:
        for key, value in _flat(given):
            hint = _type_of(key, types_by_key)
            if key in values:
                raise RunError(f"config key '{key}' is given twice")
            values[key] = _checked(key, _parse(key, value, hint) if isinstance(value, str) else value, hint)
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
    return values


def flat_settings(settings: Any) -> dict[str, Any]:
    """Dotted names to plain values."""
    return dict(_flat(dataclasses.asdict(settings)))


def _config_dict(section: Any) -> ConfigDict:
    config = ConfigDict()
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            config[field.name] = _config_dict(value)
        elif optional_type(hints[field.name]) is not None:
            config[field.name] = config_dict.placeholder(_plain_type(optional_type(hints[field.name])))
            config[field.name] = value
        else:
            config[field.name] = value
    return config


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _type_of(key: str, types_by_key: Mapping[str, Any]) -> Any:
    if key in types_by_key:
        return types_by_key[key]
    if any(known.startswith(f"{key}.") for known in types_by_key):
        raise RunError(f"config key '{key}' is a section: set one of its keys, as in '{key}.NAME=value'")
    raise RunError(unknown_key(key, types_by_key))


def _plain_type(hint: Any) -> type:
    if get_origin(hint) is Literal:
        return str
    return get_origin(hint) or hint


def _described(hint: Any) -> str:
    inner = optional_type(hint)
    if inner is not None:
        return f"{_described(inner)} or none"
    if get_origin(hint) is Literal:
        return " or ".join(str(arg) for arg in get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "a list of texts")


def _wrong(key: str, hint: Any, found: Any) -> RunError:
    return RunError(f"config key '{key}': expected {_described(hint)}, found {quote(found)}")


def _parse(key: str, text: str, hint: Any) -> Any:
    """The value that a text stands for, by the type of its key."""
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
    """The value in its type: whole numbers are numbers, lists are tuples, and nothing else is converted."""
    inner = optional_type(hint)
    if inner is not None:
        return None if value is None else _checked(key, value, inner)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
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


def _build(section: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(section)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        hint, key = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            arguments[field.name] = _build(hint, values, f"{key}.")
        elif key in values:
            arguments[field.name] = values[key]
    return section(**arguments)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].strip("'\"")
