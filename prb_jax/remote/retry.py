"""When a request is tried again, and how an answer is shown in a message."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from prb_jax.errors import quote

if TYPE_CHECKING:
    import httpx

RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 that may go away by themselves."""

LONGEST_WAIT = 60.0
"""Seconds between two tries, at most, whatever the endpoint asks for."""


def without_key(value: object, key: str | None) -> str:
    """Return an answer, or a part of it, for a message; one that holds the key that was sent is not shown."""
    return "an answer that holds the key (not shown)" if key and key in str(value) else quote(value)


def shown(answer: httpx.Response) -> str:
    """Return the text of an answer for a message."""
    return without_key(answer.text, answer.request.headers.get("authorization", "").removeprefix("Bearer "))


def retry_after(answer: httpx.Response, default: float) -> float:
    """Return the seconds that an endpoint asks to wait, given as a number or as a date."""
    given = answer.headers.get("retry-after", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(given).timestamp() - time.time()
        except (ValueError, TypeError):
            return default
    return min(max(0.0, seconds), LONGEST_WAIT)  # in this order "nan" is 0
