"""How servers are asked: the options of an endpoint, when a request is tried again, and what a message shows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

from prb_jax.errors import RunError, quote
from prb_jax.records.options import option

if TYPE_CHECKING:
    import httpx

KEY = "PRB_ENDPOINT_KEY"  # the environment variable with the key that is sent to an endpoint

LENGTH_FIELDS: Final = ("max_tokens", "max_completion_tokens")
"""How an endpoint is told the most tokens of a reply: newer models refuse the first, older servers the second."""

RETRIED = frozenset({408, 409, 425, 429})  # statuses below 500 that may go away by themselves
LONGEST_WAIT = 60.0  # seconds between two tries, at most, whatever the endpoint asks for


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """How an endpoint is asked; `key` is sent as a bearer token.

    Raises:
      RunError: another `length_field`.
    """

    url: str = option(
        MISSING,
        f"instead: an API like OpenAI's, as https://HOST/v1; its key is read from {KEY}",
        "URL",
        flag="endpoint",
    )
    model: str = option(MISSING, "of the model at the endpoint", "NAME")
    key: str | None = field(default=None, repr=False)
    concurrency: int = option(8, "requests at a time", least=1)
    tries: int = option(6, "of one request", least=1)
    seconds: float = option(
        120.0, "until a try is given up, from connecting to the last byte of its answer", above=0
    )
    backoff: float = option(
        1.0, "seconds before the second try; twice as many before each further one", above=0
    )
    prices: tuple[float, float] | None = option(
        None,
        "dollars for a million tokens of prompts and of replies, for the cost in summary.json",
        "DOLLARS DOLLARS",
        flag="price",
    )
    length_field: str | None = option(
        None,
        "how the endpoint is told the most tokens of a reply (default: max_tokens, until it refuses it)",
        choices=LENGTH_FIELDS,
    )
    no_temperature: bool = option(
        False, "send no temperature, to models that refuse one (default: until it is refused)"
    )

    def __post_init__(self) -> None:
        if self.length_field not in (None, *LENGTH_FIELDS):
            raise RunError(f"expected one of {', '.join(LENGTH_FIELDS)}, found {quote(self.length_field)}")


def endpoint_options(
    url: str | None, model: str | None, *, price: Sequence[float] | None = None, **chosen: Any
) -> EndpointOptions | None:
    """Return the options of an endpoint from a command line, with the key of the environment; None for none.

    Args:
      url, model: of the endpoint.
      price: dollars for a million tokens of prompts and of replies.
      chosen: further fields of :class:`EndpointOptions`.

    Raises:
      RunError: one of URL and model without the other, or a price without them.
    """
    if url is None and model is None:
        if price is not None:
            raise RunError("--price: belongs to --endpoint URL")
        return None
    if url is None or model is None:
        raise RunError("--endpoint URL and --model NAME: expected both or neither")
    prices = None if price is None else (price[0], price[1])
    return EndpointOptions(url=url, model=model, key=os.environ.get(KEY) or None, prices=prices, **chosen)


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
