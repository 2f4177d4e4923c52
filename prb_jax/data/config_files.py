"""Reads options from YAML and TOML files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError, quote

SUFFIXES = (".yaml", ".yml", ".toml")

_CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def find_config(name: str | Path) -> Path:
    """Return the file of a config: a path, or the name of a config of the package, as "bt_user_blind" or "rl/sft".

    Raises:
      RunError: there is no such file, and the package has no config of this name.
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


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Return the keys and values of a YAML or TOML file, as nested dicts.

    Raises:
      RunError: the file cannot be read, has another suffix, or holds anything but distinct keys with values.
    """
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise RunError(f"{file}: expected a file named {', '.join('*' + suffix for suffix in SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8")
        value = tomllib.loads(text) if file.suffix == ".toml" else _yaml(text)
    except FileNotFoundError:
        raise RunError(f"{file}: no such config file") from None
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        kind = "TOML" if file.suffix == ".toml" else "YAML"
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise RunError(f"{file}: not {kind} ({reason})") from error
    if not isinstance(value, dict):
        raise RunError(f"{file}: expected keys with values, found {quote(value)}")
    return value


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the words for a key that does not exist, with the nearest one that does."""
    near = _nearest(key, list(known))
    return f"unknown config key {quote(key)}" + (f"; did you mean '{near}'?" if near else "")


def _nearest(key: str, known: list[str]) -> str | None:
    """A key with the same last word abbreviated, in the same section first; then any that is spelled alike."""
    section, _, last = key.rpartition(".")
    ordered = sorted(known, key=lambda name: name.rpartition(".")[0] != section)
    for name in ordered:
        words = name.rpartition(".")[2].split("_")
        if len(words) > 1 and last == "".join(word[0] for word in words):
            return name
    beside = [name for name in known if section and name.rpartition(".")[0] == section]
    lasts = {name.rpartition(".")[2]: name for name in reversed(ordered)}
    for spelled, among in ((key, beside), (last, list(lasts)), (key, known)):
        if close := difflib.get_close_matches(spelled, among, n=1, cutoff=0.65):
            return lasts.get(close[0], close[0]) if among == list(lasts) else close[0]
    return None


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice; the standard loader keeps the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key.value, str)):
                if key.value in seen:
                    raise ValueError(
                        f"line {key.start_mark.line + 1}: the key {quote(key.value)} is given twice"
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        value = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise ValueError(f"line {mark.line + 1}: {problem}" if mark and problem else str(error)) from error
    return {} if value is None else value
