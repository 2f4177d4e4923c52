"""URLs of object storage in place of local paths: inputs are fetched, outputs staged, and both shown as URLs."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from prb_jax.errors import PrbError, RunError, printable, quote, refuse_unknown
from prb_jax.platform.paths import OUTPUTS, copies, localised, names_url, shown
from prb_jax.platform.storage.objects import Store
from prb_jax.platform.storage.staging import Staging, TakenOverError
from prb_jax.platform.storage.states import (
    StateChangedError,
    errors_of_copies,
    fetch_state,
    read_copies,
    read_state,
    write_copies,
)

_NAMES: Final = frozenset({("distil", "reward")})
"""Options of verbs that name an object inside a run, which is not copied."""

_SECONDS: Final = 10.0
_TRIES: Final = 5

_open: list[_Session] = []
_guard = threading.RLock()


@dataclasses.dataclass
class _Session:
    distributed: bool
    stagings: dict[str, Staging] = dataclasses.field(default_factory=dict)
    fetched: dict[str, str] = dataclasses.field(default_factory=dict)
    finish: bool = True


def storage_folder() -> Path:
    """Return the folder of local copies: ``$PRB_JAX_STORAGE``, ``$PRB_JAX_CACHE/storage`` or a user cache."""
    if chosen := os.environ.get("PRB_JAX_STORAGE"):
        return Path(chosen)
    if cache := os.environ.get("PRB_JAX_CACHE"):
        return Path(cache) / "storage"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prb_jax" / "storage"


def localise_options(options: argparse.Namespace) -> None:
    """Replace the URLs in the options of a command line by local paths; its words stay as they are."""
    for name, value in vars(options).items():
        if name != "words" and (options.words[0], name) not in _NAMES and names_url(value):
            setattr(options, name, localised(value, output=name in OUTPUTS))


@contextlib.contextmanager
def session(*, distributed: bool = False) -> Iterator[_Session]:
    """Manage the outputs at URLs that the body names; a nested session joins the outer one.

    At the end each output is pushed, and its files get their names in the store. After an error, or if the session's
    ``finish`` is False, the output is pushed as it is, and a later run can continue it.

    Raises:
      RunError: an output cannot be pushed, or another process took it over.
    """
    if _open:
        yield _open[0]
        return
    current = _Session(distributed)
    _open.append(current)
    try:
        yield current
    except BaseException as error:
        _close(current, finish=False, after=error)
        raise
    else:
        _close(current, finish=current.finish, after=None)
    finally:
        _open.clear()


def _close(current: _Session, *, finish: bool, after: BaseException | None) -> None:
    failed: PrbError | None = None
    for staging in current.stagings.values():
        try:
            staging.close(finish=finish)
            if finish or current.distributed:
                atexit.register(staging.remove)  # until then the caller can read the output
        except PrbError as error:
            failed = failed or error
    if failed is None:
        return
    taken_over = isinstance(failed, TakenOverError) and not isinstance(after, Exception)  # also after SIGTERM
    if after is None or isinstance(after, KeyboardInterrupt) or taken_over:
        raise failed from None
    print(f"prb: warning: {failed}", file=sys.stderr)


@contextlib.contextmanager
def names_in_output() -> Iterator[None]:
    """Print URLs instead of local copies, also in warnings, and escape control characters in standard output.

    Names from data and configs may contain sequences that move a terminal's cursor or write to its clipboard.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Shown(before[0], escaped=True), _Shown(before[1])  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def with_styles(stream: Any) -> Any:
    """Return a stream that accepts styles; the caller escapes control characters in names."""
    return _Shown(stream._stream) if isinstance(stream, _Shown) else stream


class _Shown:
    def __init__(self, stream: TextIO, *, escaped: bool = False) -> None:
        self._stream, self._escaped = stream, escaped

    def write(self, text: str) -> int:
        self._stream.write(printable(shown(text)) if self._escaped else shown(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def accepts_urls(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a public function: URLs may replace paths, also in its options; ``name`` is its public name."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_urls(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            refuse_unknown(name, kwargs, signature.parameters)
            return function(*args, **kwargs)  # raises the fitting TypeError
        with session():
            for parameter, value in given.arguments.items():
                if parameter == "out" and not isinstance(value, str | os.PathLike | None):
                    raise RunError(f"out: expected a path, found {quote(value)}")
                if (name, parameter) in _NAMES:
                    continue
                if (
                    isinstance(value, dict)
                    and signature.parameters[parameter].kind is inspect.Parameter.VAR_KEYWORD
                ):
                    named = {key: localised(one, output=key in OUTPUTS) for key, one in value.items()}
                    given.arguments[parameter] = named
                else:
                    given.arguments[parameter] = localised(value, output=parameter in OUTPUTS)
            return function(*given.args, **given.kwargs)

    with_urls.__module__, with_urls.__qualname__ = "prb_jax", name  # pickled by its public name
    return with_urls


def staged(url: str) -> str:
    """Return the local folder for the output at a URL."""
    with _guard:
        if not _open:
            raise RunError(f"{url}: an output at a URL requires an open storage session")
        current = _open[0]
        if url not in current.stagings:
            if url.count("/") < 3:
                raise RunError(f"{url}: names only a bucket; expected {url}/NAME")
            current.stagings[url] = Staging(
                url,
                storage_folder().expanduser().absolute(),
                seconds=_seconds(),
                may_push=lambda: not current.distributed or _is_first_of_job(),
                shared=current.distributed,
            )
            copies[url] = str(current.stagings[url].path)
        return copies[url]


def _seconds() -> float:
    text = os.environ.get("PRB_JAX_PUSH_SECONDS") or str(_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RunError(f"PRB_JAX_PUSH_SECONDS: expected a number of seconds above 0, found {text!r}")
    return seconds


def _is_first_of_job() -> bool:
    """Return True if this is process 0 of an initialised job; unlike ``jax.process_index``, starts no device."""
    distributed = sys.modules.get("jax._src.distributed")
    state = None if distributed is None else distributed.global_state
    return state is not None and state.client is not None and state.process_id == 0


def fetched(url: str) -> str:
    """Return a local copy of the current version of the file or folder at a URL."""
    with _guard:
        for known in _open[0].stagings if _open else ():
            if f"{url}/".startswith(f"{known}/"):  # this process writes it
                return copies[known] + url.removeprefix(known)
        if _open and url in _open[0].fetched:  # a command sees one version
            return _open[0].fetched[url]
        path = _fetch(Store(url))
        copies[url] = str(path)
        if _open:
            _open[0].fetched[url] = str(path)
        return str(path)


def _fetch(store: Store) -> Path:
    """Return a copy of the store's current contents; files of an earlier command's copy are verified and reused."""
    for _ in range(_TRIES):
        state = read_state(store)
        if not state.files:
            raise RunError(f"{store.url}: no such object, and none below it")
        path = _cached(store.url, state.known_as)
        record = path.parent.with_suffix(".json")
        with _held(path.parent), contextlib.suppress(StateChangedError):
            known = read_copies(record)
            copies = fetch_state(store, path, state, known)
            if copies != known:
                write_copies(record, copies)
            return path
    raise RunError(f"{store.url}: keeps changing while it is fetched; try again")


def _cached(url: str, version: str) -> Path:
    place = hashlib.sha256(json.dumps([url, version]).encode()).hexdigest()[:16]
    return storage_folder().expanduser().absolute() / "inputs" / place / url.rpartition("/")[2]


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a folder of the cache; another process that wants the folder waits until it is complete."""
    with errors_of_copies(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
