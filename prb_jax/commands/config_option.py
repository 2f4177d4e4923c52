"""`--config FILE`: options of a command from a YAML or TOML file; the command line comes before the file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prb_jax.commands.arguments import Parser
from prb_jax.data.config_files import read_config_file, unknown_key
from prb_jax.errors import RunError, quote
from prb_jax.runs.command_line import set_command_line

_NOT_IN_FILES = ("help", "config")


def add_config(sub: Parser) -> None:
    """Add the option to the parser of a verb."""
    sub.option(
        "--config FILE",
        "YAML or TOML file with these options (model: PATH, data: [FILE], profile_posts: 3, ...); what the "
        "command line says comes before it",
    )


def with_config(options: argparse.Namespace, sub: Parser) -> argparse.Namespace:
    """Return the options of a command line with those of its config file, recorded as if it had said all.

    Args:
      options: as `sub` parsed them, with the words of the command line in `words`.
      sub: the parser of the verb; the options that it needs must be given in one place or the other.

    Raises:
      RunError: the file cannot be read, or has a key or value that the command line has not.
    """
    actions = {action.dest: action for action in sub._actions if action.dest not in _NOT_IN_FILES}
    if options.config is not None:
        given = _read_options(Path(options.config), actions)
        # What the namespace holds already is not overwritten by defaults, only by what the command line says.
        # Lists would be added to, and a positional argument that is absent would overwrite.
        late = {name: value for name, value in given.items() if _is_late(actions[name])}
        early = {name: value for name, value in given.items() if name not in late}
        parsed, _ = sub.parse_known_args(options.words[1:], argparse.Namespace(**early))
        options = argparse.Namespace(**{**vars(options), **vars(parsed), "model": options.model})
        for name, value in late.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        set_command_line(["prb", options.words[0], *_words(options, actions)])
    sub.require([_shown(actions[name]) for name in sub.needed if getattr(options, name) is None])
    return options


def _is_late(action: argparse.Action) -> bool:
    return not action.option_strings or action.nargs == "+"


def _is_flag(action: argparse.Action) -> bool:
    return action.nargs == 0


def _shown(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar)


def _read_options(path: Path, actions: dict[str, argparse.Action]) -> dict[str, Any]:
    found = {}
    for written, value in read_config_file(path).items():
        key = str(written).replace("-", "_")
        if key not in actions:
            raise RunError(f"{path}: {unknown_key(key, actions)}")
        if key in found:
            raise RunError(f"{path}: config key '{key}' is given twice")
        if value is not None:
            found[key] = _checked(actions[key], value, where=f"{path}: config key '{key}'")
    return found


def _checked(action: argparse.Action, value: Any, *, where: str) -> Any:
    if _is_flag(action):
        if not isinstance(value, bool):
            raise RunError(f"{where}: expected true or false, found {quote(value)}")
        return value
    if action.nargs == "+":
        values = value if isinstance(value, list) else [value]
        if not values or (action.type is None and not all(isinstance(item, str) for item in values)):
            raise RunError(f"{where}: expected a text or a list of texts, found {quote(value)}")
        return [_checked_one(action, item, where=where) for item in values]
    return _checked_one(action, value, where=where)


def _checked_one(action: argparse.Action, value: Any, *, where: str) -> Any:
    if not isinstance(value, str if action.type is None else str | int) or isinstance(value, bool):
        expected = "a text" if action.type is None else "a whole number"
        raise RunError(f"{where}: expected {expected}, found {quote(value)}")
    if action.choices is not None and value not in action.choices:
        raise RunError(f"{where}: expected {' or '.join(action.choices)}, found {quote(value)}")
    if not callable(action.type):
        return value
    try:
        return action.type(str(value))
    except argparse.ArgumentTypeError as error:
        raise RunError(f"{where}: {error}") from None
    except ValueError:
        raise RunError(f"{where}: expected a whole number, found {quote(value)}") from None


def _words(options: argparse.Namespace, actions: dict[str, argparse.Action]) -> Iterator[str]:
    """The command line that says the same without a file."""
    for name, action in sorted(actions.items(), key=lambda item: bool(item[1].option_strings)):
        value = getattr(options, name)
        if value is None or value == action.default:
            continue
        yield from action.option_strings[:1]
        if not _is_flag(action):
            yield from (str(item) for item in (value if isinstance(value, list) else [value]))
