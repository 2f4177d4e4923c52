"""Reads the bodies of requests: small bodies here, large bodies in a separate process.

Parsing many megabytes of JSON would block all other requests, because Python runs one thread at a time. The separate
process returns little: the items to score, within the size limits of the server.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import IO, Final

from prb_jax.errors import DataError
from prb_jax.records.reading import parse_json
from prb_jax.serving.fields import WHERE, Body
from prb_jax.serving.routes import ROUTES, ScoreRequest
from prb_jax.serving.sizes import UNLIMITED, Sizes

LARGE: Final = (
    50_000  # bodies from this many bytes go to a separate process: reading them here takes up to 40 ms
)
LARGEST: Final = (
    1_000_000  # bodies from this many bytes go to a second process, and smaller ones do not wait for them
)

_PROGRAM: Final = (
    "import sys; sys.path[:] = {path!r}; from prb_jax.serving.request_reader import work; work()"
)


def parse_body(data: bytes, sizes: Sizes = UNLIMITED) -> Body:
    """Return the JSON object that a request carries.

    Raises:
      DataError: If the body is not a JSON object.
    """
    body = parse_json(data, where=WHERE, error=DataError)
    if not isinstance(body, dict):
        raise DataError(f"{WHERE}: expected a JSON object, found {type(body).__name__}")
    return Body(body, sizes)


def understand(path: str, data: bytes, sizes: Sizes) -> ScoreRequest:
    """Parse a request to one of the `ROUTES`.

    Raises:
      DataError: If a field is wrong; TooLargeError if the request is too large.
    """
    body = parse_body(data, sizes)
    wanted = ROUTES[path](body)
    sizes.check_texts(wanted.items)
    return replace(wanted, ignored=_listed(body.ignored()))


def _listed(names: Sequence[str]) -> str:
    """Return field names for a header; names that do not fit are only counted."""
    plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 64][:20]
    more = len(names) - len(plain)
    return ", ".join([*plain, *([f"and {more} more"] if more else [])])


class RequestReader:
    """Parses requests, large ones in other processes."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._large, self._largest = _Process(sizes), _Process(sizes)

    async def read(self, path: str, data: bytes) -> ScoreRequest:
        """Parse a request; see :func:`understand`."""
        if len(data) < LARGE:
            return understand(path, data, self._sizes)
        process = self._large if len(data) < LARGEST else self._largest
        return await asyncio.wrap_future(process.thread.submit(process.understand, path, data))

    def close(self) -> None:
        """End the other processes, even in the middle of a request."""
        for process in (self._large, self._largest):
            process.close()


class _Process:
    """A process that starts with its first request, and the thread that waits for it."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self.thread = ThreadPoolExecutor(1, "read")
        self._process: subprocess.Popen[bytes] | None = None

    def understand(self, path: str, data: bytes) -> ScoreRequest:
        if self._process is None:
            command, pipe = [sys.executable, "-c", _PROGRAM.format(path=sys.path)], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            _send(self._sizes, self._process.stdin)
        try:
            _send((path, data), self._process.stdin)
            assert self._process.stdout is not None
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:  # it was killed, perhaps out of memory
            with self._process as ended:
                ended.kill()
            self._process = None
            raise RuntimeError("the process that reads requests has ended") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        if (process := self._process) is not None:
            process.kill()


def _send(value: object, pipe: IO[bytes] | None) -> None:
    assert pipe is not None
    pickle.dump(value, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def work() -> None:
    """Run the other process: read requests from standard input until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches this process too
    gc.disable()  # requests never form reference cycles, and searching for them would double the time
    received = sys.stdin.buffer
    sizes = pickle.load(received)
    while True:
        try:
            path, data = pickle.load(received)
        except EOFError:
            return
        try:
            answer: object = understand(path, data, sizes)
        except Exception as error:
            answer = error
        del data
        _send(answer, sys.stdout.buffer)
        del answer
