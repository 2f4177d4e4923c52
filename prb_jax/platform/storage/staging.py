"""A run folder at a URL: the run works in a local folder; the store always holds a consistent earlier state of it.

Object stores have no append, rename or lock. During a run, the store holds under ``.prb/``:

``manifest-NUMBER.json``  The state of the folder: every file with its size, its sha256, and the objects that hold its
                          bytes, in order. The greatest number is the current state.
``WRITER-NUMBER``         These objects; each is written once, under a name unique to the process. If a file grew, only
                          the new bytes are written, joined with earlier small objects. Writing a file of n bytes
                          therefore costs O(n log n) in all.

A state is a snapshot of one instant: a run can continue from any instant of its folder, and so from any state. A push
writes the objects first, then the manifest, and then removes the objects that only the previous manifest needed. A
manifest is written only if its number is free: if two processes continue the same state, one gets the number and the
other ends. A process that opens the folder to continue it takes the next number at once. An older process that still
runs, or wakes up again, then ends.

At the end the files get their final names (copied within the store if a file is one object). A last manifest records
this. ``.prb/`` is then removed, that manifest last. While a manifest exists, it defines the state, not the plain files.
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
    """Local folder of a run at a URL: fetched when opened, then pushed every few seconds and at the end.

    Attributes:
      path: Local folder of the run.

    Args:
      url: URL of the run folder, or of the single file that a verb writes; also an attribute.
      root: Folder of all local copies. It persists between runs, for data that could not be pushed.
      seconds: Seconds between two pushes.
      may_push: Returns True if this process is the writer; called again at every push.
      shared: If True, other processes of the same job have their own folder for this URL on this machine.

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
        """Push the current state, and release the folder.

        Args:
          finish: If True, the run is complete: its files get their final names in the store.

        Raises:
          RunError: the push failed, or another process took over the run.
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
                f"{error}; all files are kept in {self._home}: after this is fixed, the same command on this machine "
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
                if "" in state.files:  # the URL is one file
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
        """Make the local folder match a state or a later one; return the digests of the state's files."""
        known_as, digests = self._read_record()
        if known_as != state.known_as or digests.keys() != state.files.keys():
            copies = fetch_state(self._store, self.path, state)
            digests = {name: copy.sha256 for name, copy in copies.items()}
            self._write_record(state.known_as, digests)
            return digests
        # The local folder holds this state or a later one that could not be pushed, so its files may be longer.
        # Missing or shorter files were lost or removed since; fetching them again is harmless.
        lost = []
        for name, stored in state.files.items():
            path = self.path / name
            if not path.is_file() or path.stat().st_size < stored.size:
                lost.append(name)
        if lost:
            gone = f"the local copy lost files; fetching them again: {listed(lost)}"
            print(f"prb: warning: {self.url}: {gone}", file=sys.stderr)
            fetch_files(self._store, self.path, state, lost)
        return digests

    def _read_record(self) -> tuple[str, dict[str, str | None]]:
        """Return the state of the store that the local folder continues, and the digests of that state's files."""
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
                    _interrupt()  # the run ends, and `close` raises the reason
                return
            except Exception as error:  # the next push retries, and the last one raises
                if str(error) != told:
                    told = str(error)
                    print(f"prb: warning: {error}; the run continues and will retry", file=sys.stderr)

    def push(self) -> bool:
        """Write the current state if it differs from the store's.

        Returns False, and changes nothing, if files were replaced too fast for a snapshot.
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
            return False  # a file was replaced meanwhile: take a new snapshot
        self._pushed = signatures
        if entries != self._state.files:
            self._state = self._write_manifest(self._state, entries)
        return True

    def _push_last(self) -> None:
        if not any(self.push() for _ in range(20)):
            raise RunError(f"{self.path}: is still being written to, so its final state cannot be pushed")

    def _snapshot(self) -> tuple[dict[str, Signature], dict[str, BinaryIO | None]] | None:
        """Return the signatures of all files at one instant, and the files changed since the last push, the first open.

        An open file keeps its bytes even if another file replaces it.
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
        """Write the bytes of a file that the store lacks; return None if the file became shorter."""
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
        # A file under its final name is overwritten at the end, so no other state may depend on it.
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
          TakenOverError: the store's state is no longer the one that this process continues.
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
        """Raise TakenOverError unless this state has the newest manifest."""
        if newest_manifest(self._store, self._store.versions()) != state.number:
            raise self._taken_over()

    def _taken_over(self) -> TakenOverError:
        return TakenOverError(
            f"{self.url}: another process has taken over this run and continues it; this one ends. Give "
            "each run a separate folder"
        )

    def _finish(self) -> None:
        """Give the files their final names in the store, and remove everything else that it holds of the run."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                self._store.upload("", file, start=0, size=self.path.stat().st_size)
            return
        self._pushed = {}  # read every file again: the final store must equal the local folder
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
        self._write_record("finished", {})  # the local folder no longer continues any state
        self._state = State()


def _interrupt() -> None:
    """End this process's run as Ctrl-C does; use SIGTERM if Ctrl-C is ignored, e.g. under `nohup`."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)


def _close(files: Mapping[str, BinaryIO | None]) -> None:
    for file in files.values():
        if file is not None:
            file.close()


def _add(digest: Any, file: BinaryIO, size: int) -> bool:
    """Add the next bytes of a file to a digest; return False if the file is too short."""
    while size > 0:
        piece = file.read(min(_PIECE, size))
        if not piece:
            return False
        digest.update(piece)
        size -= len(piece)
    return True
