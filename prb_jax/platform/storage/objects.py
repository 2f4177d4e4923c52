"""Objects below one gs:// or s3:// URL, read and written through fsspec; transient failures are retried."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import io
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO, Final, TypeVar

from prb_jax.errors import RunError

TRIES: Final = 9
_FIRST_WAIT: Final = 0.25
_LONGEST_WAIT: Final = 30.0
_BLOCK: Final = 32 << 20
_THREADS: Final = 8
_LONGEST_NAME: Final = 250  # bytes; file systems allow 255, and a temporary name is longer

# Errors that a retry does not fix.
_DEFINITE: Final = (
    *(PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, AttributeError),
    *(ImportError, NotImplementedError),
)
_DEFINITE_NAMES: Final = (
    "NoCredentialsError", "DefaultCredentialsError", "ParamValidationError", "ProfileNotFound"
)  # fmt: skip
_DEFINITE_NUMBERS: Final = (errno.EINVAL, errno.EPERM, errno.ENOSYS)
_MD5: Final = re.compile(r"[0-9a-fA-F]{32}")
_TRANSIENT_STATUS: Final = (401, 408, 409, 425, 429)  # 401: an expired token

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Checksum:
    """Checksum of an object in the store, and the digest of the bytes received."""

    kind: str  # "MD5", "CRC32C" or "ETag"
    stored: bytes
    digest: Any  # of the bytes so far; has `update` and `digest`


def _stored_checksum(info: Mapping[str, Any]) -> _Checksum | None:
    """Return the checksum in the store's metadata of an object; None if it has none that can be computed here.

    Google Cloud Storage has the MD5 of non-composite objects, and the CRC32C of all. On S3 the ETag is the MD5 if the
    object was written in one piece.
    """
    if md5 := info.get("md5Hash"):
        return _Checksum("MD5", base64.b64decode(md5), _md5())
    if crc := info.get("crc32c"):
        with contextlib.suppress(ImportError):  # a dependency of gcsfs
            google_crc32c = import_module("google_crc32c")
            if google_crc32c.implementation == "c":
                return _Checksum("CRC32C", base64.b64decode(crc), google_crc32c.Checksum())
    etag = str(info.get("ETag") or "").strip('"')
    return _Checksum("ETag", bytes.fromhex(etag), _md5()) if _MD5.fullmatch(etag) else None


class Store:
    """Objects below a URL, by their names relative to it; "" is the object at the URL itself.

    Args:
      url: ``gs://BUCKET/NAME`` or ``s3://BUCKET/NAME``. gcsfs and s3fs find credentials and endpoints.

    Raises:
      RunError: the package for the scheme is not installed, or there are no credentials. Methods raise RunError if a
        request is refused or still fails after all retries, and FileNotFoundError if an object to read is missing.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url, (scheme, _, rest) = url, url.partition("://")
        if fault := next(filter(None, map(fault_of_name, rest.split("/"))), None):
            raise RunError(f"{url}: cannot be copied to a file on this machine: {fault}")
        try:
            self._fs: Any = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
        except ImportError as error:
            package = "s3fs" if scheme == "s3" else "gcsfs"
            raise RunError(
                f"{url}: needs {package}, which is not installed: pip install 'prb-jax[storage]'"
            ) from error
        except Exception as error:  # credentials that cannot be read
            raise RunError(f"{url}: cannot be opened: {_reason(error)}") from error
        # gcsfs compares the checksum of a written object only on request; a mismatch is an error, so it is retried.
        # s3fs sends a checksum with each write, and S3 rejects bytes that differ.
        self._checked = {"consistency": "md5"} if scheme == "gs" else {}
        self._root: str = self._fs._strip_protocol(url).rstrip("/")

    def versions(self) -> dict[str, str]:
        """Return the version of every object below the URL by name; an object's version changes with the object."""
        try:
            items = self._do("", lambda path: self._fs.find(path, detail=True))
        except FileNotFoundError:
            return {}
        below = f"{self._root}/"
        return {
            path.removeprefix(below): _version(info)
            for path, info in items.items()
            if path.startswith(below) and info.get("type") != "directory" and not path.endswith("/")
        }

    def version(self) -> str | None:
        """Return the version of the object at the URL itself; None if there is no such object."""
        try:
            facts = self._do("", self._fs.info)
        except FileNotFoundError:
            return None
        return _version(facts) if facts.get("type") == "file" else None

    def read(self, name: str) -> bytes:
        """Return the bytes of an object."""
        file = io.BytesIO()
        self.fetch(name, file)
        return file.getvalue()

    def fetch(self, name: str, file: BinaryIO) -> None:
        """Append the bytes of an object to an open file, in blocks that are retried separately.

        The bytes are compared with the store's checksum; if they differ, they are fetched a second time.

        Raises:
          RunError: the bytes differ twice.
        """
        begin, first = file.tell(), b""
        while True:
            info = self._do(name, self._fs.info)
            checksum = _stored_checksum(info)
            for data in self._blocks(name, int(info["size"])):
                file.write(data)
                if checksum is not None:
                    checksum.digest.update(data)
            if checksum is None or (came := checksum.digest.digest()) == checksum.stored:
                return
            if checksum.kind == "ETag" and (came == first or self._do(name, self._has_own_etag)):
                return  # the ETag is not an MD5; two equal fetches confirm the bytes
            if first:
                raise RunError(
                    f"{self.place(name)}: damaged in both fetches: expected {checksum.kind} {checksum.stored.hex()}, "
                    f"found {came.hex()}"
                )
            first = came
            file.seek(begin)
            file.truncate()

    def _blocks(self, name: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, _BLOCK):
            count = min(_BLOCK, size - start)

            def block(path: str, start: int = start, count: int = count) -> bytes:
                data = self._fs.cat_file(path, start=start, end=start + count)
                if len(data) != count:
                    raise OSError(errno.EIO, f"expected {count} bytes, found {len(data)}")
                return data

            yield self._do(name, block)

    def _has_own_etag(self, path: str) -> bool:
        """Return True if S3 encrypts the object with a key of KMS or the customer: its ETag is not an MD5 then."""
        bucket, key, _ = self._fs.split_path(path)
        head = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        return head.get("ServerSideEncryption") not in (None, "AES256") or "SSECustomerAlgorithm" in head

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that must not exist yet; return True if this call wrote it.

        Only one of several writers succeeds if the store supports preconditions (Google Cloud Storage, S3).
        """

        def write(path: str) -> None:
            try:
                self._fs.pipe_file(path, data, mode="create", **self._checked)
            except Exception as error:
                if type(error).__name__ == "ChecksumError":  # this call made the object, from damaged bytes
                    self._fs.rm_file(path)
                raise

        try:
            self._write(name, write)
            return True
        except (FileExistsError, RunError):
            # If the response to a successful write is lost, the retry is refused: compare the contents.
            with contextlib.suppress(FileNotFoundError):
                return self.read(name) == data
            raise

    def upload(self, name: str, file: BinaryIO, *, start: int, size: int) -> None:
        """Write `size` bytes of an open file, from offset `start`, as one object."""

        def copy(path: str) -> None:
            file.seek(start)
            if size <= _BLOCK:
                self._fs.pipe_file(path, _read(file, size), **self._checked)
                return
            digest = _md5()
            try:
                with self._fs.open(path, "wb", block_size=_BLOCK) as target:
                    for offset in range(0, size, _BLOCK):
                        data = _read(file, min(_BLOCK, size - offset))
                        digest.update(data)
                        target.write(data)
                stored = self._fs.info(path).get("md5Hash") if self._checked else None
            except FileNotFoundError as error:  # also raised if the response to the last block is lost
                raise OSError(errno.EIO, f"the upload is gone: {_reason(error)}") from error
            expected = base64.b64encode(digest.digest()).decode()
            if stored not in (None, expected):
                raise OSError(errno.EIO, f"the store has the MD5 {stored}, expected {expected}")

        self._write(name, copy)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store, without a download."""
        self._write(source, lambda path: self._fs.cp_file(path, self._path(target)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove the objects; missing ones are skipped."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._do(name, self._fs.rm_file)

        in_threads(remove, names)

    def place(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _write(self, name: str, request: Callable[[str], Any]) -> None:
        try:
            self._do(name, request)
        except FileNotFoundError as error:
            raise RunError(f"{self.url}: cannot be written: no such bucket, or {name} is gone") from error

    def _do(self, name: str, request: Callable[[str], Result]) -> Result:
        """Return the result of a request for an object's path; retry transient failures."""
        place = self.place(name)
        for attempt in range(TRIES):
            try:
                self._fs.invalidate_cache()
                return request(self._path(name))
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:
                if _is_definite(error):
                    raise RunError(f"{place}: refused: {_reason(error)}") from error
                if attempt == TRIES - 1:
                    raise RunError(f"{place}: failed {TRIES} times, last: {_reason(error)}") from error
            time.sleep(min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT) * random.uniform(0.5, 1.0))
        raise AssertionError("not reached")


def fault_of_name(part: str) -> str | None:
    """Return why a part of an object's name cannot be the name of a local file; None if it can."""
    if part in ("", ".", ".."):
        return f"its part {part!r} names no file"
    if "\0" in part:
        return "its name holds a NUL"
    try:
        size = len(part.encode())
    except UnicodeEncodeError:
        return "its name is not text"
    return (
        None if size <= _LONGEST_NAME else f"a part of its name has {size} bytes, more than {_LONGEST_NAME}"
    )


def in_threads(action: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Apply ``action`` to several items at once; raise the first error after all have ended."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="storage") as pool:
        for done in [pool.submit(action, item) for item in items]:
            done.result()


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"a local file became shorter: expected {size} more bytes, found {len(data)}")
    return data


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _version(info: Mapping[str, Any]) -> str:
    names = ("generation", "ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
    return json.dumps([info.get("size"), *(str(info[name]) for name in names if info.get(name))])


def _is_definite(error: Exception) -> bool:
    if isinstance(error, _DEFINITE) or type(error).__name__ in _DEFINITE_NAMES:
        return True
    if isinstance(error, OSError) and (
        error.errno in _DEFINITE_NUMBERS or str(error).startswith("Forbidden")
    ):
        return True
    with contextlib.suppress(TypeError, ValueError):  # gcsfs' HttpError; others have no such code
        status = int(getattr(error, "code", 0) or 0)
        return 400 <= status < 500 and status not in _TRANSIENT_STATUS
    return False


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
