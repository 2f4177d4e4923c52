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
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from prb_jax.errors import PrbError, RunError, listed
from prb_jax.platform.files import whole_file
from prb_jax.platform.storage.objects import Store, in_threads
from prb_jax.platform.storage.states import (
    PRIVATE,
    Signature,
    State,
    StateChangedError,
    StoredFile,
    errors_of_copies,
    fetch_files,
    fetch_state,
    manifest_name,
    manifest_text,
    newest_manifest,
    read_state,
    scan,
    signature,
)

_PIECE: Final = 8 << 20
_HELD_OPEN: Final = 200
_TRIES: Final = 5


class TakenOverError(RunError):
    """Another process continues the run."""


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
        with errors_of_copies(self._home):
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
            try:
                state = read_state(self._store)
                if "" in state.files:  # one file
                    fetch_state(self._store, self.path, state)
                    return State()
                digests = self._fetch_folder(state)
            except StateChangedError:
                continue
            files = {name: replace(stored, sha256=digests[name]) for name, stored in state.files.items()}
            state = replace(state, files=files)
            if state.number == 0 or not self._may_push():
                return state
            with contextlib.suppress(TakenOverError):
                return self._write_manifest(state, state.files)
        raise TakenOverError(
            f"{self.url}: other processes are starting this run at the same time; end all but one"
        )

    def _fetch_folder(self, state: State) -> Mapping[str, str | None]:
        """Make the local folder that of a state or a later one; return the digests of the state's files."""
        known_as, digests = self._read_record()
        if known_as != state.known_as or digests.keys() != state.files.keys():
            copies = fetch_state(self._store, self.path, state)
            digests = {name: copy.sha256 for name, copy in copies.items()}
            self._write_record(state.known_as, digests)
            return digests
        # The local folder is that of this state or a later one, which could not be pushed; then its files may be
        # longer. What is missing or shorter was lost, or removed since: it is harmless if it comes back.
        lost = []
        for name, stored in state.files.items():
            path = self.path / name
            if not path.is_file() or path.stat().st_size < stored.size:
                lost.append(name)
        if lost:
            gone = f"the local copy lost files, which are fetched again: {listed(lost)}"
            print(f"prb: warning: {self.url}: {gone}", file=sys.stderr)
            fetch_files(self._store, self.path, state, lost)
        return digests

    def _read_record(self) -> tuple[str, dict[str, str | None]]:
        """Of which state of the store the local folder is a later one, and the digests of that state's files."""
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            return record["state"], dict(record["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return "", {}

    def _write_record(self, state: str, digests: Mapping[str, str | None]) -> None:
        with errors_of_copies(self._record), whole_file(self._record) as file:
            file.write(json.dumps({"state": state, "sha256": dict(digests)}).encode())

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
                if held is not None or signature(os.fstat(file.fileno())) == signatures[name]:
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
            signatures = scan(self.path)
            changed = [
                name
                for name, now in signatures.items()
                if self._pushed.get(name) != now or name not in self._state.files
            ]
            files: dict[str, BinaryIO | None] = dict.fromkeys(changed)
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                for name in changed[:_HELD_OPEN]:
                    files[name] = (self.path / name).open("rb")
                if scan(self.path) == signatures:
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
        known_as = manifest_text(
            state, files, writer=self._writer, host=os.uname().nodename, process=os.getpid()
        )
        new = State(files, state.number + 1, known_as, state.plain)
        try:
            self._check_newest(state)
            if not self._store.create(manifest_name(new.number), new.known_as.encode()):
                raise self._taken_over()
        except TakenOverError:
            self._store.remove(self._unclaimed)
            raise
        self._unclaimed.clear()
        self._check_newest(new)
        self._write_record(new.known_as, {name: entry.sha256 for name, entry in files.items()})
        garbage = {part for part in state.objects - new.objects if part.startswith(PRIVATE)}
        self._store.remove([*garbage, *([manifest_name(state.number)] if state.number else [])])
        return new

    def _check_newest(self, state: State) -> None:
        """Raise TakenOverError unless the newest manifest is that of this state."""
        if newest_manifest(self._store, self._store.versions()) != state.number:
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
        self._store.remove(private - {manifest_name(state.number)})
        self._store.remove([manifest_name(state.number)])
        self._write_record("finished", {})  # what is here now is no later state of anything
        self._state = State()


def _interrupt() -> None:
    """End the run of this process as Ctrl-C does; as SIGTERM where Ctrl-C is ignored, as in a job behind `nohup`."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)


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
