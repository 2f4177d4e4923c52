"""Runs from and to real servers of object storage, of which one request in twenty fails."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest

from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.platform.paths import localised
from prb_jax.platform.storage import objects
from prb_jax.platform.storage.objects import Store
from tests.platform.processes.jobs import ended, job
from tests.platform.storage.servers import failing_proxy, gcs_server, s3_server
from tests.platform.storage.stores import files_in
from tests.platform.storage.test_copies import ODD
from tests.training.tiny import rows as model_rows
from tests.training.tiny import write_model, write_rows

SCORER = """
import time

def score(comparison):
    time.sleep(0.002)
    return [float(len(text)) for text in comparison.responses]
"""


@pytest.fixture(params=["s3", "gs"])
def bucket(request, tmp_path, monkeypatch) -> Iterator[tuple[str, Any]]:
    """The URL of an empty bucket behind the failing proxy, and the same bucket without it."""
    environment = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FSSPEC_GS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # read on import: else it asks a server that no emulator has
        "PRB_JAX_STORAGE": str(tmp_path / "copies"),
        "PRB_JAX_PUSH_SECONDS": "0.3",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for package in {"s3": ("s3fs", "moto.server"), "gs": ("gcsfs", "gcp_storage_emulator")}[request.param]:
        lacking = f"{package} is not installed: pip install 'prb-jax[test-storage]'"
        pytest.importorskip(package, reason=lacking)
    with ExitStack() as stack:
        port = stack.enter_context({"s3": s3_server, "gs": gcs_server}[request.param]())
        address, counts = stack.enter_context(failing_proxy(port, 0.05))
        fsspec.config.conf.setdefault("gs", {})["token"] = "anon"
        fresh = {"use_listings_cache": False, "skip_instance_cache": True}
        direct = fsspec.filesystem(request.param, endpoint_url=f"http://127.0.0.1:{port}", **fresh)
        direct.mkdir("bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield f"{request.param}://bucket", direct
        assert counts["passed"]


def rows(count: int) -> bytes:
    pairs = (
        {"id": str(n), "chosen": "a" * (n % 7 + 1), "rejected": "bbb", "user_id": str(n % 50)}
        for n in range(count)
    )
    return "".join(json.dumps(pair | {"question": "q"}) + "\n" for pair in pairs).encode()


def compare(direct: Any, folder: Path) -> None:
    """The folder in the bucket has the files and the bytes of the local one, but for the record's times and names."""
    direct.invalidate_cache()
    files = files_in(folder)
    assert {path.removeprefix("bucket/runs/x/") for path in direct.find("bucket/runs/x")} == files.keys()
    for name in files.keys() - {"run.json"}:
        assert direct.cat_file(f"bucket/runs/x/{name}") == files[name], name


def test_objects_come_back_whatever_byte_they_end_in(bucket):
    url, direct = bucket
    for last in b"\r\n \0-":
        data = b"object" + bytes([last])
        direct.pipe_file("bucket/object", data)
        assert Store(url).read("object") == data
    direct.pipe_file("bucket/object", b"")
    assert Store(url).read("object") == b""


@pytest.mark.parametrize("case", ["beside", "deep", "long", "slashes", "missing", "no JSON", "letter"])
def test_an_odd_bucket_is_one_error_that_names_the_object(bucket, monkeypatch, case: str):
    url, direct = bucket
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.001)
    keys, message = ODD[case]
    for name, data in keys.items():
        direct.pipe_file(f"bucket/odd/{name}", data)
    with pytest.raises(RunError) as raised:
        localised(f"{url}/odd")
    assert message in str(raised.value)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_an_object_that_the_store_holds_with_other_bytes_is_an_error(bucket, monkeypatch):
    from gcp_storage_emulator.storage import Storage

    create = Storage.create_file

    def other(self: Any, bucket: str, name: str, content: bytes, *rest: Any) -> None:
        create(self, bucket, name, content, *rest)
        self.objects[bucket][name]["md5Hash"] = "AAAAAAAAAAAAAAAAAAAAAA=="

    monkeypatch.setattr(Storage, "create_file", other)
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.001)
    store, direct = Store(bucket[0]), bucket[1]
    with pytest.raises(RunError, match="object: failed 9 times, last: MD5 checksum failed"):
        store.upload("object", io.BytesIO(b"bytes"), start=0, size=5)
    monkeypatch.setattr(objects, "_BLOCK", 1 << 18)
    with pytest.raises(RunError, match=r"object: failed 9 times, last: .*the store has the MD5 AAAAAAAAA"):
        store.upload("object", io.BytesIO(b"block" * (1 << 16)), start=0, size=5 << 16)
    direct.pipe_file("bucket/object", b"bytes")
    with pytest.raises(RunError, match="gs://bucket/object: damaged in both fetches: expected MD5 00000000"):
        store.read("object")


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_an_object_that_was_made_of_other_bytes_is_made_again_by_the_same_writer(bucket, monkeypatch):
    from gcp_storage_emulator.storage import Storage

    create, times = Storage.create_file, []

    def damage(self: Any, bucket: str, name: str, content: bytes, file: Any, *rest: Any) -> None:
        if not times:
            content = b"Bytes"
            file["md5Hash"] = base64.b64encode(hashlib.md5(content).digest()).decode()
        times.append(content)
        create(self, bucket, name, content, file, *rest)

    monkeypatch.setattr(Storage, "create_file", damage)
    store = Store(bucket[0])
    assert store.create("object", b"bytes")
    assert times == [b"Bytes", b"bytes"]
    assert store.read("object") == b"bytes"


@pytest.mark.slow
def test_ten_thousand_comparisons_with_failing_requests_and_a_kill(bucket, tmp_path, monkeypatch):
    url, direct = bucket
    data = rows(10_000)
    direct.pipe_file("bucket/data/pairs.jsonl", data)
    (tmp_path / "pairs.jsonl").write_bytes(data)
    (tmp_path / "scorer.py").write_text(SCORER)
    model = f"{tmp_path}/scorer.py:score"
    words = f"evaluate {model} --data {url}/data/pairs.jsonl --out {url}/runs/x --no-progress".split()
    process = subprocess.Popen([sys.executable, "-m", "prb_jax", *words], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not stored_size(direct):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    monkeypatch.setenv("PRB_JAX_STORAGE", str(tmp_path / "another machine"))
    assert cli.main(words) == 0
    record = json.loads(direct.cat_file("bucket/runs/x/run.json"))
    assert len(record["sessions"]) == 2
    local = ["--data", f"{tmp_path}/pairs.jsonl", "--out", f"{tmp_path}/local", "--no-progress"]
    assert cli.main(["evaluate", model, *local]) == 0
    compare(direct, tmp_path / "local")


def stored_size(direct: Any) -> int:
    """The bytes of the rows in the newest state that the bucket holds."""
    try:
        newest = max(path for path in direct.find("bucket/runs/x/.prb") if "manifest" in path)
        return json.loads(direct.cat_file(newest))["files"]["scores.jsonl"]["size"]
    except (ValueError, KeyError, FileNotFoundError):
        return 0


def test_a_run_from_and_to_a_server(bucket, tmp_path):
    url, direct = bucket
    direct.pipe_file("bucket/data/pairs.jsonl", rows(40))
    (tmp_path / "pairs.jsonl").write_bytes(rows(40))
    for data, out in (
        (f"{url}/data/pairs.jsonl", f"{url}/runs/x"),
        (str(tmp_path / "pairs.jsonl"), str(tmp_path / "local")),
    ):
        words = ["evaluate", "baseline:length", "--data", data, "--out", out, "--no-progress"]
        assert cli.main(words) == 0
    compare(direct, tmp_path / "local")
    assert os.environ["PRB_JAX_STORAGE"].startswith(str(tmp_path))


@pytest.mark.slow
def test_several_processes_have_one_folder_that_the_first_pushes(bucket, tmp_path):
    url, direct = bucket
    for name, data in files_in(write_model(tmp_path / "tiny")).items():
        direct.pipe_file(f"bucket/tiny/{name}", data)
    pairs = write_rows(tmp_path / "pairs.jsonl", model_rows(60)).read_bytes()
    direct.pipe_file("bucket/data/pairs.jsonl", pairs)
    words = ["-m", "prb_jax", "evaluate", f"{url}/tiny", "--data", f"{url}/data/pairs.jsonl", "--no-progress"]
    with job([*words, "--distributed", "--out", f"{url}/runs/x"], count=2) as processes:
        assert [status for status, *_ in ended(processes)] == [0, 0]
    direct.invalidate_cache()
    scored = direct.cat_file("bucket/runs/x/scores.jsonl").decode().splitlines()
    assert [json.loads(row)["id"] for row in scored] == [row["id"] for row in model_rows(60)]
    assert not direct.find("bucket/runs/x/.prb")
    assert json.loads(direct.cat_file("bucket/runs/x/run.json"))["sessions"][0]["devices"]["processes"] == 2
