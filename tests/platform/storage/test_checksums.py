"""What comes from a store is compared with the checksums that the store gives."""

from __future__ import annotations

import base64
import hashlib
import io
from typing import Any

import pytest

from prb_jax.errors import RunError
from prb_jax.platform.storage.objects import Store
from tests.platform.storage.stores import UnreliableStore

DATA, WRONG, OTHER = b"123456789", b"123456780", b"223456789"
DIGEST = hashlib.md5(DATA)
MD5 = {"md5Hash": base64.b64encode(DIGEST.digest()).decode()}
CRC32C = {"crc32c": base64.b64encode(bytes.fromhex("e3069283")).decode()}  # the check value of CRC-32/ISCSI
ETAG = {"ETag": f'"{DIGEST.hexdigest()}"'}


def fetched(monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], *downloads: bytes) -> tuple[bytes, int]:
    """What is fetched from a store that sends these bytes one after the other, and how many it sent."""
    left = list(downloads)
    monkeypatch.setattr(UnreliableStore, "info", lambda self, path, **options: {"size": len(DATA)} | info)
    monkeypatch.setattr(UnreliableStore, "cat_file", lambda self, path, start, end: left.pop(0)[start:end])
    file = io.BytesIO(b"before")
    file.seek(0, io.SEEK_END)
    Store("s3://b/o").fetch("", file)
    assert file.getvalue().startswith(b"before")
    return file.getvalue().removeprefix(b"before"), len(downloads) - len(left)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, store: type[UnreliableStore]) -> dict[str, str]:
    """What S3 says of an object beside its ETag."""
    said: dict[str, str] = {}
    monkeypatch.setattr(store, "split_path", lambda self, path: ("b", "o", None), raising=False)
    monkeypatch.setattr(store, "call_s3", lambda self, method, **options: said, raising=False)
    return said


@pytest.mark.parametrize("info", [MD5, CRC32C, ETAG], ids=lambda info: next(iter(info)))
def test_what_came_damaged_is_fetched_again_and_then_an_error(monkeypatch, head, info):
    if info is CRC32C:
        pytest.importorskip("google_crc32c")
    assert fetched(monkeypatch, info, DATA) == (DATA, 1)
    assert fetched(monkeypatch, info, WRONG, DATA) == (DATA, 2)
    twice = r"s3://b/o: damaged in both fetches: expected (MD5|CRC32C|ETag) [0-9a-f]+,"
    with pytest.raises(RunError, match=twice):
        fetched(monkeypatch, info, WRONG, OTHER, DATA)


def test_what_is_no_checksum_is_not_compared(monkeypatch, head):
    several_parts = {"ETag": f'"{"0" * 32}-2"'}
    assert fetched(monkeypatch, several_parts, WRONG) == (WRONG, 1)
    assert fetched(monkeypatch, {}, WRONG) == (WRONG, 1)
    # Some stores have ETags that look like an MD5 and are none: the same bytes twice are those that they hold.
    assert fetched(monkeypatch, ETAG, WRONG, WRONG, DATA) == (WRONG, 2)
    with pytest.raises(RunError, match="damaged in both fetches"):
        fetched(monkeypatch, MD5, WRONG, WRONG)
    head["ServerSideEncryption"] = "AES256"
    assert fetched(monkeypatch, ETAG, WRONG, DATA) == (DATA, 2)
    head["ServerSideEncryption"] = "aws:kms"
    assert fetched(monkeypatch, ETAG, WRONG, DATA) == (WRONG, 1)
