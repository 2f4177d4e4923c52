"""Paths as users give them: `storage/` maps URLs of object storage to local paths, and messages show the URLs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import RunError, listed
from prb_jax.seams import get

OUTPUTS: Final = frozenset({"out", "target", "export", "json"})
"""Parameters and options that name outputs; all others name inputs."""

CACHE: Final = "cache"
"""Option of `prb build` for a cache that several runs read and write."""

# URLs also occur inside NAME:URL, KEY=URL, URL,URL and URL?FIELD=COLUMN. A Path turns "gs://" into "gs:/".
_URL: Final = re.compile(
    r"(?:(?<=[:=,\[\"' ])|^)(?P<scheme>gs|s3):/{1,2}(?P<rest>[^/\s,?\"'\]][^\s,?\"'\]]*)"
)

copies: dict[str, str] = {}
"""Local path of each URL that was fetched or staged."""


def names_url(value: object) -> bool:
    """Return True if a text or path, or any entry of a list of these, contains a gs:// or s3:// URL."""
    if isinstance(value, str | Path):
        return _URL.search(str(value)) is not None
    return isinstance(value, list | tuple) and any(isinstance(v, str | Path) and names_url(v) for v in value)


def localised(value: Any, *, output: bool = False) -> Any:
    """Return a value with every URL replaced by a local path, also in the fields of options and settings.

    Args:
      value: Value from the user; returned unchanged if it contains no URL.
      output: If True, the value names an output: the storage session pushes its local folder regularly and at the end.

    Raises:
      RunError: the URL does not exist, or the store cannot be read.
    """
    if isinstance(value, str | Path):
        if not names_url(value):
            return value
        if str(value).removeprefix("config.").startswith(f"{CACHE}="):
            raise _no_cache(value)
        place = get("storage", "staged" if output else "fetched").value
        new = _URL.sub(lambda match: place(f"{match['scheme']}://{match['rest'].rstrip('/')}"), str(value))
        return Path(new) if isinstance(value, Path) else new
    if isinstance(value, list | tuple) and names_url(value):
        return type(value)(localised(item, output=output) for item in value)
    if dataclasses.is_dataclass(value) and type(value).__name__.endswith(("Options", "Settings")):
        return _with_local_fields(value)
    return value


def _with_local_fields(value: Any) -> Any:
    changed = {}
    for item in dataclasses.fields(value):
        old = getattr(value, item.name)
        if item.name == CACHE and names_url(old):
            raise _no_cache(f"{CACHE}={old}")
        inner = dataclasses.is_dataclass(old)
        new = _with_local_fields(old) if inner else localised(old, output=item.name in OUTPUTS)
        if item.init and new is not old:
            changed[item.name] = new
    return dataclasses.replace(value, **changed) if changed else value


def _no_cache(path: object) -> RunError:
    return RunError(f"{path}: several builds share the cache as files: expected a local folder")


def shown(value: Any) -> Any:
    """Return a text, or all texts in a JSON value, with local copies replaced by their URLs."""
    if not copies:
        return value
    if isinstance(value, str):
        for url, path in sorted(copies.items(), key=lambda item: -len(item[1])):
            value = value.replace(path, url)
        return value
    if isinstance(value, Mapping):
        return {name: shown(item) for name, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, list | tuple) else value


def is_path(name: str) -> bool:
    """Return True if a name such as "runs/first" is a path and no hub id: its parent is "runs", or contains runs."""
    parent = Path(name).parent
    records = (record for pattern in ("*/run.json", "*/train.json") for record in parent.glob(pattern))
    return name.startswith("runs/") or next(records, None) is not None


def folder_hint(folder: Path) -> str:
    """Return the end of a message about an unexpected folder: its kind of run, and the models and runs directly below
    it."""
    parts = []
    for record in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            kind = json.loads(record.read_text(encoding="utf-8")).get("kind")
            if str(kind).startswith("prb_jax "):
                shows = f" (`prb audit {folder} --report` shows it)" if kind == "prb_jax audit" else ""
                parts.append(f"it is a run of the kind {kind.removeprefix('prb_jax ')!r}{shows}")
                break
    for what, names in (("models", ("config.json", "train.json")), ("runs", ("run.json",))):
        inside = sorted({path.parent.name for name in names for path in folder.glob(f"*/{name}")})
        if inside:
            parts.append(f"{what} in it: {listed([str(folder / name) for name in inside])}")
    return "".join(f"; {part}" for part in parts)


def no_run(folder: Path, lacking: str) -> str:
    """Return the message about a folder without a run: the folder is missing, or lacks a file."""
    if not folder.exists():
        return f"{folder}: no such folder; expected the folder of a run{near_path(folder)}"
    return f"{folder}: expected the folder of a run, found {lacking}{folder_hint(folder)}"


def near_path(path: Path) -> str:
    """Return the end of a message about a missing path: the path beside it with the most similar name, if any.

    A name with blanks, of which a shell passed on only the first word, is named with the remedy.
    """
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    if cut := next((name for name in sorted(beside) if name.startswith(f"{path.name} ")), None):
        return f"; did you mean '{path.parent / cut}'? A name with blanks needs quotation marks"
    by_stem = {
        name.partition(".")[0]: name for name in sorted(beside, reverse=True)
    }  # suffixes are alike anyway
    near = difflib.get_close_matches(path.name.partition(".")[0], by_stem, n=1)
    return f"; did you mean {path.parent / by_stem[near[0]]}?" if near else ""
