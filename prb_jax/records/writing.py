"""Write files and folders atomically, by one process at a time, with a clear error on failure."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError
from prb_jax.platform.files import temporary_name as temporary_name
from prb_jax.platform.files import whole_file
from prb_jax.platform.paths import names_url, shown


def refuse_file(
    out: str | Path, *, name: str = "the output folder", hint: str = "choose a folder with --out"
) -> None:
    """Raise RunError if the output folder is an empty name, a URL, or an existing file."""
    if not str(out):
        raise RunError("out: expected the name of a folder, found an empty text")
    if names_url(out):
        raise RunError(
            f"{out}: a URL of object storage; only prb and the public functions of prb_jax accept URLs"
        )
    path = Path(out)
    if os.path.lexists(path) and not path.is_dir():
        raise RunError(f"{path}: {name} is a file; {hint}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError from writing ``path`` into one clear RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; all finished work is kept: after you fix this "
            "(free space, permissions), the same command continues the run"
        ) from error


def json_line(value: Any) -> bytes:
    """Return a row of a file of JSON lines: strict JSON (no NaN, no infinity), with its line feed."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def write_json(path: Path, value: Any, *, indent: int = 2, sort_keys: bool = False) -> None:
    """Write the bytes of :func:`json_file` atomically.

    Raises:
      RunError: The file cannot be written.
    """
    write_file(path, json_file(value, indent=indent, sort_keys=sort_keys))


def json_file(value: Any, *, indent: int = 2, sort_keys: bool = False) -> bytes:
    """Return strict JSON (no NaN, no infinity), with URLs instead of paths of their local copies."""
    return json.dumps(shown(value), indent=indent, sort_keys=sort_keys, allow_nan=False).encode() + b"\n"


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically and create its parent folders.

    Raises:
      RunError: The file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(data)


def write_once(files: Mapping[Path, bytes], *, replace: bool = False) -> None:
    """Write the files of a verb without a run folder; if all exist with these bytes, report that it was finished.

    So repeating a command that was killed at its very end succeeds, and no command overwrites another command's files.

    Args:
      files: Contents by path.
      replace: If True, replace files with other contents.

    Raises:
      RunError: A file exists with other contents, and nothing is written; or a file cannot be written.
    """
    missing = []
    for path, data in files.items():
        with writing(path):
            same = path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data
        if not same and not replace and os.path.lexists(path):
            raise RunError(
                f"{path}: exists already with other contents; remove it, or choose another name with --out"
            )
        missing += [] if same else [path]
    for path in missing:
        write_file(path, files[path])
    if not missing:
        say_finished(*files)


def say_finished(*paths: Path) -> None:
    """Report that an earlier call already wrote these files or folders."""
    print(f"prb: {', '.join(map(str, paths))}: finished already by an earlier call", file=sys.stderr)


@contextlib.contextmanager
def held_folder(path: Path, *, purpose: str = "is writing to this run") -> Iterator[None]:
    """Create a folder with its parents if needed, and lock it against a second writer.

    The lock ends with the process. A file system without locks leaves the folder unlocked.

    Raises:
      RunError: The folder cannot be written, or another process holds its lock.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        folder = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{path}: another process {purpose}; wait for it, or end it") from None
        yield
    finally:
        os.close(folder)
