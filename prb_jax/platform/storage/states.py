"""States of a folder in a store, and verified copies of them on this machine.

A folder in a store is either plain (one object per file) or, during a run, a manifest and its objects
(:mod:`prb_jax.platform.storage.staging`). :func:`read_state` reads both and trusts neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from prb_jax.errors import RunError, listed, quote
from prb_jax.platform.files import whole_file
from prb_jax.platform.storage.objects import Store, fault_of_name, in_threads

PRIVATE: Final = ".prb/"
_MANIFEST: Final = f"{PRIVATE}manifest-"
_MANIFEST_NAME: Final = re.compile(re.escape(_MANIFEST) + r"(\d{12,18})\.json")
_SHA256: Final = re.compile("[0-9a-f]{64}")
_TRIES: Final = 5

Signature = tuple[int, int, int]
"""Inode, size and change time (ctime) of a local file; ctime changes even if the modification time is kept."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a state."""

    size: int  # in bytes
    sha256: str | None  # of its bytes; None for files without a manifest
    parts: tuple[tuple[str, int], ...]  # names and sizes of the objects that hold its bytes


@dataclass(frozen=True)
class State:
    """State of a folder in a store; an object at the URL itself is a file with the name ""."""

    files: Mapping[str, StoredFile] = field(default_factory=dict)  # by name
    number: int = 0  # of its manifest; 0 without a manifest
    known_as: str = ""  # text of the manifest, or the versions of the plain files
    # names of plain files that the store holds beside the manifest, current or not
    plain: frozenset[str] = frozenset()

    @property
    def objects(self) -> set[str]:
        """Names of all objects that hold its bytes."""
        return {part for stored in self.files.values() for part, _ in stored.parts}


@dataclass(frozen=True)
class LocalFile:
    """A local file when its digest was computed."""

    sha256: str
    signature: Signature


class StateChangedError(Exception):
    """The store's state changed during a fetch."""


def manifest_name(number: int) -> str:
    """Return the name of the object that holds a manifest."""
    return f"{_MANIFEST}{number:012}.json"


def newest_manifest(store: Store, names: Iterable[str]) -> int:
    """Return the greatest manifest number; 0 if there is no manifest.

    Raises:
      RunError: an object looks like a manifest but has no number, so the current state is unknown.
    """
    newest = 0
    for name in names:
        if name.startswith(_MANIFEST):
            match = _MANIFEST_NAME.fullmatch(name)
            if match is None:
                raise RunError(
                    f"{store.url}/{name}: not a valid manifest name, such as {manifest_name(1)}: remove the object"
                )
            newest = max(newest, int(match[1]))
    return newest


def read_state(store: Store) -> State:
    """Return the state of the file or folder at a URL; an empty state if nothing is there.

    Raises:
      RunError: a manifest is invalid, or a name cannot be a local file name; the message names the object.
    """
    if (version := store.version()) is not None:
        size = json.loads(version)[0]
        return State({"": StoredFile(size, None, (("", size),))}, known_as=version, plain=frozenset([""]))
    for _ in range(_TRIES):
        versions = store.versions()
        number = newest_manifest(store, versions)
        if number == 0:
            plain = {
                name: version
                for name, version in versions.items()
                if not name.startswith(PRIVATE) and not any(map(is_temporary, name.split("/")))
            }
            _check_names(store, plain)
            sizes = {name: json.loads(version)[0] for name, version in plain.items()}
            files = {name: StoredFile(size, None, ((name, size),)) for name, size in sizes.items()}
            known_as = json.dumps(plain, sort_keys=True) if plain else ""
            return State(files, known_as=known_as, plain=frozenset(plain))
        with contextlib.suppress(FileNotFoundError):  # a newer manifest has just replaced it
            text = store.read(manifest_name(number))
            files, plain = _parse_manifest(text, where=f"{store.url}/{manifest_name(number)}")
            _check_names(store, files)
            return State(files, number, text.decode(), plain)
    raise RunError(f"{store.url}: changed while it was fetched; try again")


def manifest_text(state: State, files: Mapping[str, StoredFile], **facts: object) -> str:
    """Return the manifest of these files as the successor of ``state``; ``facts`` are for people."""
    entries = {name: asdict(entry) for name, entry in sorted(files.items())}
    return json.dumps({"format": 1, **facts, "plain": sorted(state.plain), "files": entries})


def _parse_manifest(text: bytes, *, where: str) -> tuple[dict[str, StoredFile], frozenset[str]]:
    """Return the files of a manifest, and its plain names."""

    def check(fits: bool, what: str, expected: str, value: object) -> None:
        if not fits:
            raise RunError(f"{where}: not a manifest: {what}: expected {expected}, found {quote(value)}")

    def check_name(value: Any, what: str) -> None:
        fits = isinstance(value, str) and not any(map(fault_of_name, value.split("/")))
        check(fits, what, "the name of an object", value)

    def is_size(value: Any) -> bool:
        return type(value) is int and value >= 0

    try:
        record = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: not a manifest: not valid JSON: {error}") from error
    check(isinstance(record, dict), "its contents", "a JSON object", record)
    version, plain, entries = record.get("format"), record.get("plain"), record.get("files")
    check(type(version) is int and version == 1, "'format'", "1", version)
    check(isinstance(plain, list), "'plain'", "a list of names", plain)
    check(isinstance(entries, dict), "'files'", "an object", entries)
    for name in plain:
        check_name(name, "'plain'")
    files: dict[str, StoredFile] = {}
    for name, entry in entries.items():
        what = f"'files': {quote(name)}"
        check_name(name, what)
        check(isinstance(entry, dict), what, "an object", entry)
        size, sha256, parts = entry.get("size"), entry.get("sha256"), entry.get("parts")
        check(is_size(size), f"{what}: 'size'", "a number of bytes", size)
        hexadecimal = isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        check(sha256 is None or bool(hexadecimal), f"{what}: 'sha256'", "64 hexadecimal digits", sha256)
        pairs = isinstance(parts, list) and all(isinstance(p, list) and len(p) == 2 for p in parts)
        check(pairs, f"{what}: 'parts'", "a list of [NAME, BYTES]", parts)
        for part, length in parts:
            check_name(part, f"{what}: 'parts'")
            check(is_size(length), f"{what}: 'parts'", "a number of bytes", length)
        check(sum(length for _, length in parts) == size, f"{what}: 'parts'", f"{size} bytes in all", parts)
        files[name] = StoredFile(size, sha256, tuple((part, length) for part, length in parts))
    return files, frozenset(plain)


def _check_names(store: Store, names: Iterable[str]) -> None:
    """Raise RunError unless all names can be files in one local folder."""
    names = set(names)
    for name in sorted(names):
        if fault := next(filter(None, map(fault_of_name, name.split("/"))), None):
            raise RunError(
                f"{store.url}/{name}: cannot be a file on this machine: {fault}; rename the object"
            )
        for above in map(str, PurePosixPath(name).parents):
            if above in names:
                raise RunError(
                    f"{store.url}/{name}: cannot be a file on this machine: the object {quote(above)} has the name "
                    "of its folder; rename one of them"
                )


def fetch_state(
    store: Store, folder: Path, state: State, known: Mapping[str, LocalFile] | None = None
) -> dict[str, LocalFile]:
    """Make a local file or folder match a state exactly; for errors see :func:`fetch_files`.

    Args:
      known: Files recorded when this state was fetched before.
    """
    if "" not in state.files:
        for name in scan(folder, temporary=True).keys() - state.files.keys():
            (folder / name).unlink()
        for directory, _, _ in sorted(
            os.walk(folder), reverse=True
        ):  # an empty folder would count as a checkpoint
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        with errors_of_copies(folder):
            folder.mkdir(parents=True, exist_ok=True)
    return fetch_files(store, folder, state, state.files, known)


def fetch_files(
    store: Store,
    folder: Path,
    state: State,
    names: Iterable[str],
    known: Mapping[str, LocalFile] | None = None,
) -> dict[str, LocalFile]:
    """Fetch the files of a state that are missing here or have changed.

    Raises:
      StateChangedError: the store's state changed meanwhile.
      RunError: an object is missing, its bytes are damaged, or they cannot be stored here.
    """
    known, here, fetched = known or {}, dict[str, LocalFile](), list[str]()

    def fetch(name: str) -> None:
        stored, path, before = state.files[name], folder / name, known.get(name)
        expected = stored.sha256 or (before and before.sha256)
        with errors_of_copies(path):
            now = _local_file(path, before)
            if now is None or now.sha256 != expected:
                fetched.append(name)
                if path.is_dir():
                    shutil.rmtree(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(path) as file:
                    for part, _ in stored.parts:
                        _fetch_part(store, state, part, file)
                now = _local_file(path, None)
        if now is None or stored.sha256 not in (None, now.sha256):
            raise RunError(f"{store.place(name)}: damaged: its bytes differ from the bytes that were written")
        here[name] = now

    in_threads(fetch, names)
    if fetched and not state.number and read_state(store).known_as != state.known_as:
        raise StateChangedError  # the files may mix two versions
    return here


def _fetch_part(store: Store, state: State, part: str, file: Any) -> None:
    try:
        store.fetch(part, file)
    except FileNotFoundError as error:
        if read_state(store).known_as != state.known_as:
            raise StateChangedError from error
        if not state.number:
            raise RunError(f"{store.place(part)}: listed by the store, but cannot be read") from error
        manifest = f"{store.url}/{manifest_name(state.number)}"
        lacking = sorted(state.objects - store.versions().keys()) or [part]
        raise RunError(
            f"{manifest}: objects of this run are missing in the store: {listed(lacking)}; restore "
            f"them, or remove {store.url}/{PRIVATE} to start a new run from the files beside it"
        ) from error


@contextlib.contextmanager
def errors_of_copies(path: Path) -> Iterator[None]:
    """Turn the operating system's errors about a local copy into a one-line RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}; set PRB_JAX_STORAGE to another folder"
        ) from error


def _local_file(path: Path, before: LocalFile | None) -> LocalFile | None:
    """Return a file with its digest, recomputed if the file changed; None if there is no file."""
    if not path.is_file():
        return None
    now = signature(path.stat())
    if before is not None and before.signature == now:
        return before
    with path.open("rb") as file:
        return LocalFile(hashlib.file_digest(file, "sha256").hexdigest(), now)


def write_copies(path: Path, copies: Mapping[str, LocalFile]) -> None:
    """Record the files of a local copy for the next command that uses it."""
    record = {name: dataclasses.astuple(copy) for name, copy in copies.items()}
    with errors_of_copies(path), whole_file(path) as file:
        file.write(json.dumps(record).encode())


def read_copies(path: Path) -> dict[str, LocalFile]:
    """Return the record of :func:`write_copies`; empty if it is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: LocalFile(digest, (int(inode), int(size), int(time)))
            for name, (digest, (inode, size, time)) in record.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def scan(folder: Path, *, temporary: bool = False) -> dict[str, Signature]:
    """Return all files of a folder by name, without unfinished ones unless ``temporary`` is True."""
    signatures: dict[str, Signature] = {}
    for directory, folders, files in os.walk(folder):
        if not temporary:
            folders[:] = [name for name in folders if not is_temporary(name)]
        for name in files:
            if temporary or not is_temporary(name):
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    signatures[Path(path).relative_to(folder).as_posix()] = signature(os.stat(path))
    return signatures


def signature(status: os.stat_result) -> Signature:
    """Return the signature that shows whether a local file changed."""
    return status.st_ino, status.st_size, status.st_ctime_ns


def is_temporary(name: str) -> bool:
    """Return True if a file or folder of this name is unfinished."""
    return (name.startswith(".") and name.endswith((".tmp", ".old"))) or ".orbax-checkpoint-tmp" in name
