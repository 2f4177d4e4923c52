"""A run folder at a URL: any kill leaves a state to continue from, and the end leaves the files of a local run."""

from __future__ import annotations

import itertools
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prb_jax.errors import RunError
from prb_jax.platform.storage.objects import Store
from prb_jax.platform.storage.staging import Staging, TakenOverError
from prb_jax.platform.storage.states import fetch_state, read_state
from tests.platform.storage.stores import UnreliableStore, contents, failing, files_in

URL = "gs://bucket/runs/x"


class StoppedError(BaseException):
    """A signal came."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def stopping_signal(request):
    """Ctrl-C stops the process; or SIGTERM, where Ctrl-C is ignored, as behind nohup."""

    def stop(number, frame):
        raise StoppedError

    wanted = {signal.SIGINT: signal.SIG_IGN, request.param: stop}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class KilledError(BaseException):
    """The process is gone."""


def open_staging(root: Path, **more: Any) -> Staging:
    return Staging(URL, root, **{"seconds": 1e6, "may_push": lambda: True, **more})


def stored() -> dict[str, bytes]:
    """The files of the run in the store, by their names."""
    return {path.removeprefix("/bucket/runs/x/"): data for path, data in contents().items()}


def remote_state(root: Path) -> dict[str, bytes]:
    """What another machine would continue from."""
    store = Store(URL)
    fetch_state(store, root, read_state(store))
    return files_in(root)


def write_run(folder: Path, step: int) -> None:
    """One step of a run: rows, then the record that counts them, checkpoints of which two are kept, an end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(json.dumps({"step": step, "text": "x" * 40}).encode() + b"\n")
    checkpoint = folder / "checkpoints" / str(step)
    checkpoint.mkdir(parents=True)
    (checkpoint / "arrays").write_bytes(random.Random(step).randbytes(1000))
    (checkpoint / "empty").touch()
    for path in (folder / "checkpoints" / str(step - 2)).glob("*"):
        path.unlink()
    temporary = folder / ".run.json.tmp"
    temporary.write_text(json.dumps({"rows": step + 1}))
    temporary.replace(folder / "run.json")


def run(staging: Staging, steps: int, states: list[dict[str, bytes]]) -> None:
    """Continue a run to its end, from what its folder says is done."""
    record = staging.path / "run.json"
    done = json.loads(record.read_text())["rows"] if record.exists() else 0
    for step in range(done, steps):
        write_run(staging.path, step)
        states.append(files_in(staging.path))
        staging.push()
    staging.close(finish=True)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_request_leaves_a_state_of_one_instant_and_the_same_end(tmp_path, store, every):
    for step in range(3):
        write_run(tmp_path / "wanted", step)
    wanted = files_in(tmp_path / "wanted")
    for killed_at in itertools.count(step=every):
        store.store.clear()
        store.pseudo_dirs[:] = [""]
        states: list[dict[str, bytes]] = [{}]
        clock = itertools.count()

        def kill(request: str, path: str, clock: Any = clock, killed_at: int = killed_at) -> None:
            if next(clock) >= killed_at:
                raise KilledError

        store.fail = staticmethod(kill)
        try:
            run(open_staging(tmp_path / f"first-{killed_at}"), 3, states)
            finished = True
        except KilledError:
            finished = False
        store.fail = staticmethod(lambda request, path: None)
        assert remote_state(tmp_path / f"seen-{killed_at}") in states
        run(open_staging(tmp_path / f"second-{killed_at}"), 3, [])  # on another machine
        assert stored() == wanted
        if finished:
            break
    assert killed_at > 50


def test_failing_requests_change_nothing_and_growing_files_are_not_sent_anew(tmp_path, store):
    store.fail = staticmethod(failing(0.2))
    staging = open_staging(tmp_path / "a")
    for step in range(100):
        write_run(staging.path, step)
        staging.push()
    size = (staging.path / "rows.jsonl").stat().st_size
    parts = [count for path, count in store.written if ".prb/" in path and "manifest" not in path]
    rows = sum(parts) - 100 * (1000 + len(json.dumps({"rows": 50})))
    assert rows < 12 * size  # where each push sent the whole, it were fifty times as much
    manifest = json.loads(next(data for name, data in stored().items() if "manifest" in name))
    assert len(manifest["files"]["rows.jsonl"]["parts"]) < 10
    assert remote_state(tmp_path / "seen") == files_in(staging.path)
    staging.close(finish=True)
    assert stored() == files_in(staging.path)


def test_a_file_that_is_changed_removed_or_written_again_is_what_it_is_at_the_end(tmp_path, store):
    first = open_staging(tmp_path / "a")
    for name in ("same", "shrinks", "goes", "comes back"):
        first.path.mkdir(exist_ok=True)
        (first.path / name).write_bytes(name.encode() * 5)
    first.close(finish=True)
    assert set(stored()) == {"same", "shrinks", "goes", "comes back"}

    second = open_staging(tmp_path / "b")
    (second.path / "shrinks").write_bytes(b"s")
    (second.path / "goes").unlink()
    (second.path / "comes back").unlink()
    second.push()
    store.store["/bucket/runs/x/notes of a reader"] = store.store["/bucket/runs/x/same"]
    assert remote_state(tmp_path / "seen") == files_in(second.path)
    (second.path / "comes back").write_bytes(b"here")
    second.close(finish=True)
    own = {"same": b"same" * 5, "shrinks": b"s", "comes back": b"here"}
    assert stored() == own | {"notes of a reader": b"same" * 5}

    store.written.clear()
    third = open_staging(tmp_path / "c")
    third.close(finish=True)
    assert not store.written  # nothing was changed


def test_the_newest_process_has_the_run_and_older_ones_end(tmp_path, store):
    old = open_staging(tmp_path / "old")
    write_run(old.path, 0)
    old.push()
    new = open_staging(tmp_path / "new")
    write_run(old.path, 1)
    with pytest.raises(TakenOverError, match=f"{URL}: another process has taken over this run"):
        old.push()
    run(new, 3, [])
    wanted = stored()
    with pytest.raises(TakenOverError):  # as one that was frozen, and wakes up
        old.close(finish=True)
    assert stored() == wanted == files_in(new.path)


def test_of_two_processes_that_begin_a_run_one_goes_on(tmp_path, store):
    one, other = open_staging(tmp_path / "one"), open_staging(tmp_path / "other")
    write_run(one.path, 0)
    write_run(other.path, 0)
    one.push()
    with pytest.raises(RunError, match=f"{URL}: another process is writing to this run; wait for it"):
        open_staging(tmp_path / "other")  # on the same machine
    with pytest.raises(TakenOverError):
        other.close(finish=False)
    one.close(finish=True)
    assert stored() == files_in(one.path)


@pytest.mark.usefixtures("stopping_signal")
def test_a_push_in_the_background_says_what_failed_and_a_takeover_ends_the_run(tmp_path, store, capsys):
    staging = open_staging(tmp_path / "a", seconds=0.02)

    def refuse(request: str, path: str) -> None:
        raise PermissionError("no permission to write")

    store.fail = staticmethod(refuse)
    write_run(staging.path, 0)
    wait_until(lambda: "no permission" in capsys.readouterr().err)
    with pytest.raises(RunError, match=r"no permission to write; all files are kept in .* the same command"):
        staging.close(finish=True)
    store.fail = staticmethod(lambda request, path: None)

    again = open_staging(tmp_path / "a", seconds=0.02)  # with what could not be pushed
    assert (again.path / "run.json").exists()
    wait_until(lambda: any("manifest" in name for name in stored()))

    def go_on() -> None:
        for number in range(500):
            threading.Event().wait(0.02)
            (again.path / "more").write_bytes(str(number).encode())

    newer = open_staging(tmp_path / "b")
    with pytest.raises(StoppedError):
        go_on()
    with pytest.raises(TakenOverError):
        again.close(finish=False)
    newer.close(finish=True)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_what_is_pushed_while_others_write_is_of_one_instant(tmp_path, store):
    """The second file is written after the first, and never says more; both are replaced or appended all the time."""
    staging = open_staging(tmp_path / "a")
    staging.path.mkdir(parents=True)
    ended = threading.Event()

    def write() -> None:
        for number in itertools.count():
            with (staging.path / "rows").open("ab") as file:
                file.write(b"x")
            temporary = staging.path / ".count.tmp"
            temporary.write_text(str(number))
            temporary.replace(staging.path / "count")
            if ended.wait(0.001):
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for number in range(300):
            if len(seen) > 5 and number >= 30:
                break
            staging.push()
            state = remote_state(tmp_path / f"seen-{number}")
            if state:
                count = int(state.get("count", b"0"))
                assert count <= len(state["rows"]) <= count + 2
                seen.add(count)
    finally:
        ended.set()
        writer.join()
    assert len(seen) > 5
    staging.close(finish=True)


def test_bytes_that_changed_in_the_store_are_refused(tmp_path, store):
    staging = open_staging(tmp_path / "a")
    write_run(staging.path, 0)
    staging.push()
    part = next(path for path, data in contents().items() if b'"step"' in data)
    UnreliableStore.store[part].seek(3)
    UnreliableStore.store[part].write(b"?")
    with pytest.raises(RunError, match=f"{URL}/rows.jsonl: damaged"):
        open_staging(tmp_path / "b")
    staging.close(finish=False)
