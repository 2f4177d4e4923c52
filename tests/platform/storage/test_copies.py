"""Local copies that lost files or hold other bytes, and buckets whose objects cannot be what they should be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.platform.paths import localised
from tests.platform.storage.stores import below, files_in, put, put_key
from tests.platform.storage.test_staging import URL, open_staging, run, write_run

PARTS = {f"part-{n}.jsonl": "".join(f'{{"id": "{n}-{i}"}}\n' for i in range(100)).encode() for n in range(4)}


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def damage(path: Path) -> None:
    """Change the bytes, but neither the size nor the time of modification."""
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(b"?" + data[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [remove, empty, damage])
def test_a_cached_input_that_lost_something_is_fetched_again(store, change: Callable[[Path], None]):
    for name, data in PARTS.items():
        put(f"gs://b/data/{name}", data)
    folder, file = Path(localised("gs://b/data")), Path(localised("gs://b/data/part-0.jsonl"))
    change(folder / "part-2.jsonl")
    change(file)
    (folder / "part-9.jsonl").write_bytes(b"not of the bucket")
    store.requests.clear()
    assert localised("gs://b/data") == str(folder)
    assert localised("gs://b/data/part-0.jsonl") == str(file)
    assert files_in(folder) == PARTS
    assert file.read_bytes() == PARTS["part-0.jsonl"]
    assert store.requests["cat"] == 2  # nothing else was fetched
    localised("gs://b/data")
    assert store.requests["cat"] == 2


@pytest.mark.parametrize("record", ["", "{", "[]", '{"part-0.jsonl": 1}', '{"part-0.jsonl": ["a", ["x"]]}'])
def test_a_cached_input_without_a_whole_record_is_fetched_again(store, record: str):
    for name, data in PARTS.items():
        put(f"gs://b/data/{name}", data)
    folder = Path(localised("gs://b/data"))
    damage(folder / "part-2.jsonl")
    folder.parent.with_suffix(".json").write_text(record)
    localised("gs://b/data")
    assert files_in(folder) == PARTS


@pytest.mark.parametrize("change", [remove, empty])
@pytest.mark.parametrize("name", ["rows.jsonl", "run.json", "checkpoints/1/arrays"])
def test_a_local_copy_that_lost_a_file_does_not_replace_the_state_of_the_store(
    tmp_path, store, capsys, name: str, change: Callable[[Path], None]
):
    for step in range(4):
        write_run(tmp_path / "wanted", step)
    first = open_staging(tmp_path / "copies")
    for step in range(2):
        write_run(first.path, step)
    first.close(finish=False)  # as after SIGTERM
    change(first.path / name)
    again = open_staging(tmp_path / "copies")
    assert f"{URL}: the local copy lost files; fetching them again: {name}" in capsys.readouterr().err
    states: list[dict[str, bytes]] = []
    run(again, 4, states)
    assert len(states) == 2  # the first two steps were not made again
    assert below(URL) == files_in(tmp_path / "wanted")


def test_what_a_local_copy_has_beyond_the_store_is_kept(tmp_path, store, capsys):
    first = open_staging(tmp_path / "copies")
    for step in range(3):
        write_run(first.path, step)
        if step == 1:
            first.push()
    store.fail = staticmethod(refuse)
    with pytest.raises(RunError, match="all files are kept"):
        first.close(finish=False)
    store.fail = staticmethod(lambda request, path: None)
    again = open_staging(tmp_path / "copies")
    assert json.loads((again.path / "run.json").read_text()) == {"rows": 3}
    assert "checkpoints/0/arrays" in capsys.readouterr().err  # step 2 had removed it
    run(again, 3, states := [])
    assert not states


def refuse(request: str, path: str) -> None:
    raise PermissionError("no permission to write")


def test_a_record_of_a_local_copy_that_is_damaged_is_no_traceback(tmp_path, store):
    first = open_staging(tmp_path / "copies")
    write_run(first.path, 0)
    first.close(finish=False)
    wanted = files_in(first.path)
    for text in ("", "[]", "{}", '{"state": 1, "sha256": 2}'):
        (first.path.parent / ".state").write_text(text)
        (first.path / "rows.jsonl").unlink()
        again = open_staging(tmp_path / "copies")
        again.close(finish=False)
        assert files_in(again.path) == wanted


MANIFEST = ".prb/manifest-000000000003.json"
FILE = {"size": 4, "sha256": None, "parts": [[".prb/w-1", 4]]}


def manifest(files: Any = None, **more: Any) -> bytes:
    return json.dumps(
        {"format": 1, "plain": [], "files": {"a.jsonl": FILE} if files is None else files, **more}
    ).encode()


ODD: dict[str, tuple[dict[str, bytes], str]] = {
    "beside": ({"x": b"1", "x/y": b"2"}, "x/y: cannot be a file on this machine: the object 'x' has the name"),
    "deep": ({"x": b"1", "x/y/z/w": b"2"}, "x/y/z/w: cannot be a file on this machine: the object 'x' has the name"),
    "dot": ({".": b"1"}, "/.: cannot be a file on this machine: its part '.' names no file"),
    "dots": ({"a/../b": b"1"}, "a/../b: cannot be a file on this machine: its part '..' names no file"),
    "slashes": ({"a//b": b"1"}, "a//b: cannot be a file on this machine: its part '' names no file"),
    "NUL in a key": ({"a\0b": b"1"}, "cannot be a file on this machine: its name holds a NUL"),
    "long": ({"k" * 1000: b"1"}, "k: cannot be a file on this machine: a part of its name has 1000 bytes"),
    "long path": ({"/".join(["k" * 240] * 20): b"1"}, "File name too long"),
    "letter": ({".prb/manifest-abc.json": b"{}"}, ".prb/manifest-abc.json: not a valid manifest name"),
    "backup": (
        {MANIFEST: manifest(), ".prb/w-1": b"1234", ".prb/manifest-000000000001.json.bak": b"{}"},
        ".prb/manifest-000000000001.json.bak: not a valid manifest name",
    ),
    "missing": ({MANIFEST: manifest(), ".prb/w-2": b""}, f"{MANIFEST}: objects of this run are missing"),
    "no JSON": ({MANIFEST: b"no"}, f"{MANIFEST}: not a manifest: not valid JSON"),
    "empty": ({MANIFEST: b""}, f"{MANIFEST}: not a manifest: not valid JSON"),
    "bytes": ({MANIFEST: b"\xff\xfe"}, f"{MANIFEST}: not a manifest: not valid JSON"),
    "NULs": ({MANIFEST: b"\0" * 100}, f"{MANIFEST}: not a manifest: not valid JSON"),
    "deep JSON": ({MANIFEST: b"[" * 100_000}, f"{MANIFEST}: not a manifest: not valid JSON"),
    "a list": ({MANIFEST: b"[]"}, f"{MANIFEST}: not a manifest: its contents: expected a JSON object, found []"),
    "nothing in it": ({MANIFEST: b"{}"}, f"{MANIFEST}: not a manifest: 'format': expected 1, found None"),
    "format": ({MANIFEST: manifest(format=2)}, "'format': expected 1, found 2"),
    "plain": ({MANIFEST: manifest(plain={"a": 1})}, "'plain': expected a list of names, found"),
    "plain name": ({MANIFEST: manifest(plain=[["a"]])}, "'plain': expected the name of an object, found ['a']"),
    "plain above": ({MANIFEST: manifest(plain=["../a"])}, "'plain': expected the name of an object, found '../a'"),
    "files": ({MANIFEST: manifest([1])}, "'files': expected an object, found [1]"),
    "NUL": ({MANIFEST: manifest({"a\0b": FILE})}, ": expected the name of an object"),
    "above": ({MANIFEST: manifest({"../b": FILE})}, "'files': '../b': expected the name of an object"),
    "absolute": ({MANIFEST: manifest({"/b": FILE})}, "'files': '/b': expected the name of an object"),
    "surrogate": ({MANIFEST: manifest({"\ud800": FILE})}, "expected the name of an object"),
    "entry": ({MANIFEST: manifest({"a": 4})}, "'files': 'a': expected an object, found 4"),
    "size": ({MANIFEST: manifest({"a": FILE | {"size": "4"}})}, "'size': expected a number of bytes, found '4'"),
    "sha256": ({MANIFEST: manifest({"a": FILE | {"sha256": 5}})}, "'sha256': expected 64 hexadecimal digits, found 5"),
    "parts": ({MANIFEST: manifest({"a": FILE | {"parts": [1]}})}, "'parts': expected a list of"),
    "part": ({MANIFEST: manifest({"a": FILE | {"parts": [[None, 4]]}})}, "'parts': expected the name of an object"),
    "length": ({MANIFEST: manifest({"a": FILE | {"parts": [["w", 3]]}})}, "'parts': expected 4 bytes in all, found"),
    "beside in it": ({MANIFEST: manifest({"x": FILE, "x/y": FILE})}, "x/y: cannot be a file on this machine: the"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_an_odd_bucket_is_one_error_that_names_the_object(tmp_path, store, capsys, case: str):
    objects, message = ODD[case]
    for name, data in objects.items():
        put_key("gs://b/odd", name, data)
    before = below("gs://b/odd")
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"id": "1", "question": "q", "chosen": "a", "rejected": "b"}\n')
    for words in (
        ["evaluate", "baseline:length", "--data", "gs://b/odd", "--out", str(tmp_path / "out")],
        ["evaluate", "baseline:length", "--data", str(data), "--out", "gs://b/odd"],
    ):
        assert cli.main([*words, "--no-progress"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("prb: error: ")
        assert error.count("\n") == 1
        assert message in error
    assert below("gs://b/odd") == before
