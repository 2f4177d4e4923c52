"""Access to the Hugging Face hub: if it cannot be reached, one warning within seconds, then copies on this machine."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prb_jax.errors import PrbWarning, first_line

_SECONDS = 5.0  # time limit of a request that only tests the connection
_VALID = 60.0  # seconds until the connection is tested again


@dataclass
class _Connection:
    tested: float = -_VALID
    fault: str = ""  # reason why the hub cannot be reached


_connection = _Connection()


@contextlib.contextmanager
def hub_or_copies() -> Iterator[None]:
    """Use the hub, or only copies on this machine if the hub cannot be reached, which gives one warning.

    Libraries would otherwise repeat every request for half a minute, with a warning each time.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or not _fault():
        yield
        return
    places: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    log = logging.getLogger("datasets")
    before, level = [place.HF_HUB_OFFLINE for place in places], log.level
    try:
        log.setLevel(logging.ERROR)  # it repeats the warning
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        log.setLevel(level)
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def connection_fault() -> str:
    """Return the reason why the last test did not reach the hub; empty if it did, or if there was none."""
    return _connection.fault


def _fault() -> str:
    """Return the reason why the hub cannot be reached; empty if it answers. Warn after each test that fails."""
    now = time.monotonic()
    if now - _connection.tested < _VALID:
        return _connection.fault
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        _connection.fault = ""
    except Exception as error:  # the types differ between versions of its HTTP library
        _connection.fault = first_line(error)
        warnings.warn(
            f"the Hugging Face hub cannot be reached ({_connection.fault}): only copies on this machine are used",
            PrbWarning,
            stacklevel=5,
        )
    _connection.tested = time.monotonic()
    return _connection.fault
