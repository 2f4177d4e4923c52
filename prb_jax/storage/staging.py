"""A run folder at a URL: worked on in a local folder, of which the store always holds a consistent earlier state.

Object stores have no append, no rename and no lock. While a run goes on, the store holds under ``.prb/``

``manifest-NUMBER.json``  the state of the folder: every file with its size, its sha256, and the objects whose bytes,
                          one after the other, are its bytes. The greatest number counts.
``WRITER-NUMBER``         such objects, each written once under a name that no other process uses. Of a file that grew
                          only the new bytes are written, joined with earlier small objects, so that a file of n bytes
                          costs O(n log n) in all.

A state is that of one instant: the local folder can be continued from any instant, and so can the state. Its objects
are written first, then its manifest, and only then is removed what the manifest before it alone needed. A manifest is
written on the condition that its number is free: of two processes that continue the same state one gets it, and the
other ends. A process that opens the folder to continue it takes the next number at once, so that an older process that
still runs, or wakes up again, is the one that ends.

At the end the files are put under their names (copied within the store where a file is one object), a last manifest
says so, and ``.prb/`` is removed, that manifest last. As long as there is one, it counts, not the files beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from prb_jax.errors import PrbError, RunError
from prb_jax.storage.objects import Store, in_threads, whole_file

PRIVATE: Final = ".prb/"
_MANIFEST: Final = f"{PRIVATE}manifest-"
_PIECE: Final = 8 << 20
_HELD_OPEN: Final = 200
_TRIES: Final = 5

Signature = tuple[int, int, int]
"""Inode, size and time of change of a local file."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a state."""

    size: int  # in bytes
    sha256: str | None  # of its bytes; None where the file was found in the store without a manifest
    parts: tuple[tuple[str, int], ...]  # names and sizes of the objects that hold its bytes


@dataclass(frozen=True)
class State:
    """What the store holds of a folder."""

    files: Mapping[str, StoredFile] = field(default_factory=dict)  # by name
    number: int = 0  # of the manifest that says so; 0 where there is none
    known_as: str = ""  # its text; of a folder without a manifest the versions of its files
    # names under which the store holds files beside the manifest, current or not
    plain: frozenset[str] = frozenset()

    @property
    def objects(self) -> set[str]:
        """The names of all objects that hold bytes of it."""
        return {part for stored in self.files.values() for part, _ in stored.parts}


class TakenOverError(RunError):
    """Another process continues the run."""


def read_state(store: Store) -> State:
    """Return the state of the folder at a URL; an empty one where there is nothing."""
    for _ in range(_TRIES):
        versions = store.versions()
        if (number := _newest(versions)) == 0:
            plain = {name: version for name, version in versions.items() if not name.startswith(PRIVATE)}
            sizes = {name: json.loads(version)[0] for name, version in plain.items()}
            files = {name: StoredFile(size, None, ((name, size),)) for name, size in sizes.items()}
            known_as = json.dumps(plain, sort_keys=True) if plain else ""
            return State(files, known_as=known_as, plain=frozenset(plain))
        with contextlib.suppress(FileNotFoundError):  # a newer one has just taken its place
            text = store.read(_manifest(number))
            record = json.loads(text)
            files = {
                name: StoredFile(entry["size"], entry["sha256"], tuple(map(tuple, entry["parts"])))
                for name, entry in record["files"].items()
            }
            return State(files, number, text.decode(), frozenset(record["plain"]))
    raise RunError(f"{store.url}: was fetched while it was being changed; try again")


def fetch_state(store: Store, folder: Path, state: State) -> dict[str, str]:
    """Make a local folder hold the files of a state, and no others; return the sha256 of each by its name.

    Files that are there already are not fetched again, where the state says what they hold.

    Raises:
      FileNotFoundError: an object is gone: the state is no longer that of the store.
      RunError: the bytes are not those that were written.
    """
    for name in _scan(folder).keys() - state.files.keys():
        (folder / name).unlink()
    for directory, _, _ in sorted(os.walk(folder), reverse=True):  # an empty one would count as a checkpoint
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name in state.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RunError(f"{store.url}: {name}: not the name of a file within the folder")

    digests: dict[str, str] = {}

    def fetch(item: tuple[str, StoredFile]) -> None:
        name, stored = item
        path = folder / name
        if stored.sha256 is None or not path.is_file() or _sha256(path) != stored.sha256:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                for part, _ in stored.parts:
                    store.fetch(part, file)
        digests[name] = _sha256(path)
        if stored.sha256 not in (None, digests[name]):
            raise RunError(f"{store.url}/{name}: damaged: its bytes are not those that were written")

    in_threads(fetch, state.files.items())
    return digests


class Staging:
    """The local folder of a run at a URL: fetched when it is opened, then pushed every few seconds and at the end.

    Attributes:
      path: where it lies on this machine meanwhile.

    Args:
      url: of the run folder, or of the one file that a verb writes; also an attribute.
      root: of all local copies. Kept between two starts, for what could not be pushed.
      seconds: between two pushes.
      may_push: whether this process is the one that writes; asked again at every push.
      shared: other processes of the same job have a local folder of the same URL on this machine.

    Raises:
      RunError: the store cannot be read, or another process of this machine writes to the URL.
    """

    def __init__(
        self, url: str, root: Path, *, seconds: float, may_push: Callable[[], bool], shared: bool = False
    ) -> None:
        self.url = url.rstrip("/")
        self._store = Store(self.url)
        place = hashlib.sha256(self.url.encode()).hexdigest()[:16] + (f"-{os.getpid()}" if shared else "")
        self._home = root / "runs" / place
        self.path = self._home / self.url.rpartition("/")[2]
        self._record = self._home / ".state"
        self._writer, self._objects = uuid.uuid4().hex[:12], itertools.count(1)
        self._may_push, self._seconds = may_push, seconds
        self._pushed: dict[str, Signature] = {}
        self._unclaimed: set[str] = set()  # objects that no manifest names yet
        self._failure: PrbError | None = None
        self._ending = threading.Event()
        self._home.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._home, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._state = self._fetch()
        except BlockingIOError:
            os.close(self._lock)
            raise RunError(f"{url}: another process is writing to this run; wait for it, or end it") from None
        except BaseException:
            os.close(self._lock)
            raise
        self._thread = threading.Thread(target=self._push_on, name="push", daemon=True)
        self._thread.start()

    def close(self, *, finish: bool) -> None:
        """Push what there is, and let go of the folder.

        Args:
          finish: the run came to its end: the files get their names in the store.

        Raises:
          RunError: it could not be pushed, or another process took the run over.
        """
        self._ending.set()
        self._thread.join()
        try:
            if isinstance(self._failure, TakenOverError):
                raise self._failure
            if not self._may_push() or not self.path.exists():
                return
            if finish:
                self._finish()
            elif self.path.is_dir():
                self._push_last()
        except TakenOverError:
            raise
        except PrbError as error:
            raise RunError(
                f"{error}; all is kept in {self._home}: once this is put right, the same command on this machine "
                "continues from there"
            ) from error
        finally:
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the local folder, unless another process has opened it."""
        with contextlib.suppress(OSError):
            lock = os.open(self._home, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._home, ignore_errors=True)
            finally:
                os.close(lock)

    def _fetch(self) -> State:
        for _ in range(_TRIES):
            if self._store.version() is not None:  # one file
                with whole_file(self.path) as file:
                    self._store.fetch("", file)
                return State()
            state = read_state(self._store)
            known: dict[str, Any] = {"state": "", "sha256": {}}
            with contextlib.suppress(FileNotFoundError):
                known = json.loads(self._record.read_text(encoding="utf-8"))
            if known["state"] != state.known_as:
                try:
                    digests = fetch_state(self._store, self.path, state)
                except FileNotFoundError:
                    continue  # its objects were removed, as there is a newer one
                known = self._write_record(state.known_as, digests)
            # Else the local folder is that of the state or a later one, which could not be pushed.
            digests = known["sha256"]
            files = {name: replace(stored, sha256=digests[name]) for name, stored in state.files.items()}
            state = replace(state, files=files)
            if state.number == 0 or not self._may_push():
                return state
            with contextlib.suppress(TakenOverError):
                return self._write_manifest(state, state.files)
        raise TakenOverError(
            f"{self.url}: other processes are starting this run at the same time; end all but one"
        )

    def _write_record(self, state: str, digests: Mapping[str, str | None]) -> dict[str, Any]:
        """Keep of which state of the store the local folder is a later one."""
        record = {"state": state, "sha256": dict(digests)}
        with whole_file(self._record) as file:
            file.write(json.dumps(record).encode())
        return record

    def _push_on(self) -> None:
        told = ""
        while not self._ending.wait(self._seconds):
            try:
                if self._may_push() and self.path.is_dir():
                    self.push()
                told = ""
            except TakenOverError as error:
                self._failure = error
                if not self._ending.is_set():
                    _interrupt()  # the run ends, and `close` says why
                return
            except Exception as error:  # the next push tries again, and the last one raises
                if str(error) != told:
                    told = str(error)
                    print(f"prb: warning: {error}; the run goes on, and tries again", file=sys.stderr)

    def push(self) -> bool:
        """Write the state of this instant, if it is another one than that of the store.

        Returns False where that failed because the files were replaced too fast; nothing was changed then.
        """
        snapshot = self._snapshot()
        if snapshot is None:
            return False
        signatures, files = snapshot
        entries = {name: self._state.files[name] for name in signatures if name not in files}

        def write(item: tuple[str, BinaryIO | None]) -> None:
            name, held = item
            with contextlib.suppress(FileNotFoundError), held or (self.path / name).open("rb") as file:
                if held is not None or _signature(os.fstat(file.fileno())) == signatures[name]:
                    entry = self._write_parts(name, file, signatures[name][1])
                    if entry is not None:
                        entries[name] = entry

        try:
            in_threads(write, files.items())
        finally:
            _close(files)
        if entries.keys() != signatures.keys():
            return False  # one was replaced meanwhile: the next instant, then
        self._pushed = signatures
        if entries != self._state.files:
            self._state = self._write_manifest(self._state, entries)
        return True

    def _push_last(self) -> None:
        if not any(self.push() for _ in range(20)):
            raise RunError(f"{self.path}: is still being written to, so that its end cannot be pushed")

    def _snapshot(self) -> tuple[dict[str, Signature], dict[str, BinaryIO | None]] | None:
        """All files as they were at one instant, and those that changed since the last push; the first of them open.

        An open file keeps its bytes, also when another one takes its place.
        """
        for _ in range(200):
            signatures = _scan(self.path)
            changed = [
                name
                for name, now in signatures.items()
                if self._pushed.get(name) != now or name not in self._state.files
            ]
            files: dict[str, BinaryIO | None] = dict.fromkeys(changed)
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                for name in changed[:_HELD_OPEN]:
                    files[name] = (self.path / name).open("rb")
                if _scan(self.path) == signatures:
                    return signatures, files
            _close(files)
            time.sleep(0.005)
        return None

    def _write_parts(self, name: str, file: BinaryIO, size: int) -> StoredFile | None:
        """Write the bytes of a file that the store does not have yet; None for a file that became shorter."""
        stored = self._state.files.get(name)
        before = stored.size if stored is not None and stored.size <= size else 0
        digest = hashlib.sha256()
        if not _add(digest, file, before):
            return None
        grown = stored is not None and digest.hexdigest() == stored.sha256
        if grown and before == size:
            return stored
        if not _add(digest, file, size - before):
            return None
        # A file under its own name is written over at the end, so that no other state may need it.
        kept = stored is not None and grown and stored.parts and stored.parts[0][0].startswith(PRIVATE)
        parts = list(stored.parts) if stored is not None and kept else []
        start = sum(length for _, length in parts)
        while parts and start < size and parts[-1][1] <= size - start:
            start -= parts.pop()[1]
        if start < size:
            part = f"{PRIVATE}{self._writer}-{next(self._objects)}"
            self._unclaimed.add(part)
            self._store.upload(part, file, start=start, size=size - start)
            parts.append((part, size - start))
        return StoredFile(size, digest.hexdigest(), tuple(parts))

    def _write_manifest(self, state: State, files: Mapping[str, StoredFile]) -> State:
        """Make these files the state of the store.

        Raises:
          TakenOverError: it is not the state any more from which this process went on.
        """
        facts = {
            "format": 1,
            "writer": self._writer,
            "host": os.uname().nodename,
            "process": os.getpid(),
            "plain": sorted(state.plain),
            "files": {name: asdict(entry) for name, entry in sorted(files.items())},
        }
        new = State(files, state.number + 1, json.dumps(facts), state.plain)
        try:
            self._check_newest(state)
            if not self._store.create(_manifest(new.number), new.known_as.encode()):
                raise self._taken_over()
        except TakenOverError:
            self._store.remove(self._unclaimed)
            raise
        self._unclaimed.clear()
        self._check_newest(new)
        self._write_record(new.known_as, {name: entry.sha256 for name, entry in files.items()})
        garbage = {part for part in state.objects - new.objects if part.startswith(PRIVATE)}
        self._store.remove([*garbage, *([_manifest(state.number)] if state.number else [])])
        return new

    def _check_newest(self, state: State) -> None:
        """Raise TakenOverError unless the newest manifest is that of this state."""
        if _newest(self._store.versions()) != state.number:
            raise self._taken_over()

    def _taken_over(self) -> TakenOverError:
        return TakenOverError(
            f"{self.url}: another process has taken this run over, and goes on with it; this one ends. Give "
            "two runs two folders"
        )

    def _finish(self) -> None:
        """Give the files their names in the store, and remove everything else that it held of the run."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                self._store.upload("", file, start=0, size=self.path.stat().st_size)
            return
        self._pushed = {}  # every file is read again, so that what is at the end is exactly what is here
        self._push_last()
        state = self._state
        if state.number and not state.files.keys() <= state.plain:
            state = replace(state, plain=state.plain | state.files.keys())
            state = self._state = self._write_manifest(state, state.files)

        def put(item: tuple[str, StoredFile]) -> None:
            name, stored = item
            if stored.parts == ((name, stored.size),):
                return
            if len(stored.parts) == 1:
                self._store.copy(stored.parts[0][0], name)
                return
            with (self.path / name).open("rb") as file:
                self._store.upload(name, file, start=0, size=stored.size)

        in_threads(put, state.files.items())
        if not state.number:
            return
        self._store.remove(state.plain - state.files.keys())
        files = {name: replace(stored, parts=((name, stored.size),)) for name, stored in state.files.items()}
        state = self._state = self._write_manifest(replace(state, plain=frozenset(files)), files)
        private = {name for name in self._store.versions() if name.startswith(PRIVATE)}
        self._store.remove(private - {_manifest(state.number)})
        self._store.remove([_manifest(state.number)])
        self._write_record("finished", {})  # what is here now is no later state of anything
        self._state = State()


def _interrupt() -> None:
    """End the run of this process as Ctrl-C does; as SIGTERM where Ctrl-C is ignored, as in a job behind `nohup`."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)


def _manifest(number: int) -> str:
    return f"{_MANIFEST}{number:012}.json"


def _newest(names: Mapping[str, str]) -> int:
    """The greatest number of a manifest; 0 where there is none."""
    numbers = (name.removeprefix(_MANIFEST) for name in names if name.startswith(_MANIFEST))
    return max((int(name.removesuffix(".json")) for name in numbers), default=0)


def _scan(folder: Path) -> dict[str, Signature]:
    """Every file of a folder by its name; without those that are not whole yet, which no run needs."""
    signatures: dict[str, Signature] = {}
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_temporary(name)]
        for name in files:
            if not _is_temporary(name):
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    signatures[Path(path).relative_to(folder).as_posix()] = _signature(os.stat(path))
    return signatures


def _signature(status: os.stat_result) -> Signature:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_temporary(name: str) -> bool:
    return (name.startswith(".") and name.endswith((".tmp", ".old"))) or ".orbax-checkpoint-tmp" in name


def _close(files: Mapping[str, BinaryIO | None]) -> None:
    for file in files.values():
        if file is not None:
            file.close()


def _add(digest: Any, file: BinaryIO, size: int) -> bool:
    """Add the next bytes of a file to a digest; False where there are not as many."""
    while size > 0:
        piece = file.read(min(_PIECE, size))
        if not piece:
            return False
        digest.update(piece)
        size -= len(piece)
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
