"""A store in memory that stands for gs:// and s3://, whose requests fail as those of real ones do."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry


class UnreliableStore(MemoryFileSystem):
    """Objects in memory; before a request, and after it (an answer that is lost), ``fail`` may raise."""

    protocol = ("gs", "s3")
    root_marker = "/"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[Counter[str]] = Counter()
    written: ClassVar[list[tuple[str, int]]] = []
    fail: ClassVar[Callable[[str, str], None]] = staticmethod(lambda request, path: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(str(path).replace("gs://", "/").replace("s3://", "/"))

    def _request(self, name: str, path: str, action: Callable[[], Any]) -> Any:
        type(self).requests[name] += 1
        type(self).fail(f"before {name}", path)
        result = action()
        type(self).fail(f"after {name}", path)
        return result

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """All keys below a path, as stores list them: a key may stand beside others that it begins."""

        def keys() -> dict[str, Any]:
            place = self._strip_protocol(path).rstrip("/")
            files = list(type(self).store.items())
            return {
                key: {"name": key, "size": file.size, "type": "file", "created": file.created}
                for key, file in files
                if f"{key}/".startswith(f"{place}/")
            }

        return self._request("find", path, keys)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self._request(
            "cat", path, lambda: super(UnreliableStore, self).cat_file(path, *args, **kwargs)
        )

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        def write() -> None:
            type(self).written.append((path, len(value)))
            super(UnreliableStore, self).pipe_file(path, value, mode=mode)

        return self._request("pipe", path, write)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> Any:
        return self._request("copy", path1, lambda: super(UnreliableStore, self).cp_file(path1, path2))

    def rm_file(self, path: str) -> Any:
        return self._request("rm", path, lambda: super(UnreliableStore, self).rm_file(path))


def contents() -> dict[str, bytes]:
    """Every object by its path."""
    return {path: bytes(file.getbuffer()) for path, file in list(UnreliableStore.store.items())}


def below(url: str) -> dict[str, bytes]:
    """The objects below a URL by their names."""
    place = UnreliableStore._strip_protocol(f"{url}/") + "/"
    objects = {path: data for path, data in contents().items() if path.startswith(place)}
    return {path.removeprefix(place): data for path, data in objects.items()}


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a local folder by their names."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def put(url: str, data: bytes) -> None:
    """Make an object, without a request that may fail."""
    MemoryFileSystem.pipe_file(UnreliableStore(skip_instance_cache=True), url, data)


def put_key(url: str, key: str, data: bytes) -> None:
    """Make an object of any name below a URL, as only stores have them."""
    path = f"{UnreliableStore._strip_protocol(url)}/{key}"
    UnreliableStore.store[path] = MemoryFile(UnreliableStore(skip_instance_cache=True), path, data)


def put_folder(folder: Path, url: str) -> None:
    """Make an object below a URL of each file of a local folder."""
    for name, data in files_in(folder).items():
        put(f"{url}/{name}", data)


def failing(share: float, seed: int = 0) -> Callable[[str, str], None]:
    """Requests of which such a share is cut off or answered by 503, before or after they are done."""
    random_numbers = random.Random(seed)

    def fail(request: str, path: str) -> None:
        if random_numbers.random() < share:
            raise random_numbers.choice([ConnectionResetError("cut"), OSError(errno.EBUSY, "503 Slow Down")])

    return fail


@contextmanager
def store_in_memory() -> Iterator[type[UnreliableStore]]:
    """Let gs:// and s3:// be an empty store in memory."""
    before = {name: _registry.get(name) for name in ("gs", "s3")}
    UnreliableStore.store.clear()
    UnreliableStore.pseudo_dirs[:] = [""]
    UnreliableStore.requests.clear()
    UnreliableStore.written.clear()
    UnreliableStore.fail = staticmethod(lambda request, path: None)
    for name in before:
        fsspec.register_implementation(name, UnreliableStore, clobber=True)
    try:
        yield UnreliableStore
    finally:
        for name, value in before.items():
            _registry.pop(name, None)
            if value is not None:
                fsspec.register_implementation(name, value, clobber=True)
