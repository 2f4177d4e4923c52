"""Config files on the command line: CONFIG of the verbs that train or build, and `--config FILE` of others."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prb_jax.commands.arguments import Parser
from prb_jax.errors import RunError, quote
from prb_jax.platform.paths import OUTPUTS, localised, shown
from prb_jax.records.config_files import config_values, explained_settings, read_config, unknown_key
from prb_jax.runs.kind import set_command_line


def add_configured(
    sub: Parser, *, config: str, overrides: str, out: str, kept: str, distributed: bool = True
) -> None:
    """Add CONFIG and KEY=VALUE, for `given_config`, and `--out`; the help gives examples of each."""
    sub.needed = ("config", "out")
    about = f"Python file with get_config(), or a config included in prb_jax, e.g. {config}"
    sub.option("[CONFIG]", about)
    sub.option("[KEY=VALUE ...]", f"Settings, e.g. {overrides}", dest="overrides")
    sub.option("--out DIR", f"Run folder, also at gs:// or s3://: {out}")
    sub.option("--show-config", "Only print a config of all options with their meanings")
    sub.long_run(kept, distributed=distributed)


def show_config(load: Callable[..., Any], config: str | None, overrides: list[str], **more: Any) -> None:
    """Print every option with its meaning and its value in the config, read by `load`."""
    print(explained_settings(load(config, overrides, complete=False, **more)), end="")


def given_config(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Return the config (None if none is given) and the keys with values.

    Without `--show-config` a config and `--out` are required: if one is missing, the process ends with status 2.
    """
    given = [word for word in (options.config, *options.overrides) if word is not None]
    is_config = bool(given) and ("=" not in given[0] or Path(given[0]).is_file())
    config, overrides = given[0] if is_config else None, given[is_config:]
    wanted = () if options.show_config else (("CONFIG", config), ("--out", options.out))
    options.parser.require([name for name, value in wanted if value is None])
    return config, overrides


def with_config(options: argparse.Namespace, sub: Parser) -> argparse.Namespace:
    """Return the options of a command line merged with its config file, recorded as one command line.

    Args:
      options: Options parsed by `sub`, with the words of the command line in `words`.
      sub: Parser of the verb; each of its required options must be given in one of the two places.

    Raises:
      RunError: the file cannot be read, or has a key or value that the command line does not allow.
    """
    actions = {action.dest: action for action in sub._actions if action.dest not in ("help", "config")}
    if options.config is not None:
        given = {word.partition("=")[0] for word in options.words}
        for name, value in _read_options(Path(options.config), actions).items():
            flags = actions[name].option_strings
            if given.isdisjoint(flags) if flags else getattr(options, name) is None:
                setattr(options, name, localised(value, output=name in OUTPUTS))
        set_command_line(["prb", options.words[0], *shown(list(_words(options, actions)))])
    missing = (actions[name] for name in sub.needed if getattr(options, name) is None)
    sub.require([str((action.option_strings or [action.metavar])[0]) for action in missing])
    return options


def _read_options(path: Path, actions: dict[str, argparse.Action]) -> dict[str, Any]:
    values = {}
    for written, value in config_values(read_config(path)).items():
        key = str(written).replace("-", "_")
        if key not in actions:
            raise RunError(f"{path}: {unknown_key(key, actions)}")
        if key in values:
            raise RunError(f"{path}: config key '{key}' is given twice")
        if value is not None:
            values[key] = _checked(actions[key], value, where=f"{path}: config key '{key}'")
    return values


def _checked(action: argparse.Action, value: Any, *, where: str) -> Any:
    if action.nargs == 0 and not isinstance(value, bool):
        raise RunError(f"{where}: expected true or false, found {quote(value)}")
    if action.nargs == 0:
        return value
    if action.nargs == "+":
        values = value if isinstance(value, list) else [value]
        if not values or (action.type is None and not all(isinstance(item, str) for item in values)):
            raise RunError(f"{where}: expected a text or a list of texts, found {quote(value)}")
        checked = [_checked_one(action, item, where=where) for item in values]
        return [one for item in checked for one in (item if isinstance(item, list) else [item])]
    return _checked_one(action, value, where=where)


def _checked_one(action: argparse.Action, value: Any, *, where: str) -> Any:
    if not isinstance(value, str if action.type is None else str | int) or isinstance(value, bool):
        expected = "a text" if action.type is None else "a whole number"
        raise RunError(f"{where}: expected {expected}, found {quote(value)}")
    if action.choices is not None and value not in action.choices:
        raise RunError(f"{where}: expected {' or '.join(action.choices)}, found {quote(value)}")
    try:
        return action.type(str(value)) if callable(action.type) else value
    except argparse.ArgumentTypeError as error:
        raise RunError(f"{where}: {error}") from None


def _words(options: argparse.Namespace, actions: dict[str, argparse.Action]) -> Iterator[str]:
    """Yield the words of the equivalent command line without a file."""
    for name, action in sorted(actions.items(), key=lambda item: bool(item[1].option_strings)):
        value = getattr(options, name)
        if value is None or value == action.default:
            continue
        yield from action.option_strings[:1]
        if action.nargs != 0:
            yield from (str(item) for item in (value if isinstance(value, list) else [value]))
