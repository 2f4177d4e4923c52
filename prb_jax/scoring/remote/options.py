"""Requests to servers: options of an endpoint, rules for retries, and answers in messages."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

from prb_jax.errors import RunError, quote, short_repr
from prb_jax.records.options import option

if TYPE_CHECKING:
    import httpx

KEY = "PRB_ENDPOINT_KEY"  # environment variable with the API key of an endpoint

LENGTH_FIELDS: Final = ("max_tokens", "max_completion_tokens")
"""Names of the request field for the token limit: newer models refuse the first, older servers the second."""

RETRIED = frozenset({408, 409, 425, 429})  # temporary statuses below 500
LONGEST_WAIT = 60.0  # maximum seconds between two tries, even if the endpoint asks for more


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Options of an endpoint; `key` is sent as a bearer token.

    Raises:
      RunError: `length_field` is unknown.
    """

    url: str = option(
        MISSING,
        f"use an OpenAI-compatible API instead, e.g. https://HOST/v1; its key is read from {KEY}",
        "URL",
        flag="endpoint",
    )
    model: str = option(MISSING, "name of the model at the endpoint", "NAME")
    key: str | None = field(default=None, repr=False)
    concurrency: int = option(8, "number of concurrent requests", least=1)
    tries: int = option(6, "maximum number of tries per request", least=1)
    seconds: float = option(
        120.0, "time limit of a try, from connecting to the last byte of its answer", above=0
    )
    backoff: float = option(1.0, "seconds before the second try; doubled before each further try", above=0)
    prices: tuple[float, float] | None = option(
        None,
        "dollars per million prompt tokens and per million reply tokens, for the cost in summary.json",
        "DOLLARS DOLLARS",
        flag="price",
    )
    length_field: str | None = option(
        None,
        "request field for the token limit of a reply (default: max_tokens, until the endpoint refuses it)",
        choices=LENGTH_FIELDS,
    )
    no_temperature: bool = option(
        False, "omit the temperature, for models that refuse it (default: send it until refused)"
    )

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.length_field not in (None, *LENGTH_FIELDS):
            raise RunError(f"expected one of {', '.join(LENGTH_FIELDS)}, found {quote(self.length_field)}")


def endpoint_options(
    url: str | None, model: str | None, *, price: Sequence[float] | None = None, **chosen: Any
) -> EndpointOptions | None:
    """Return the endpoint options of a command line, with the key of the environment; None without an endpoint.

    Args:
      url, model: URL of the endpoint and name of its model.
      price: Dollars per million prompt tokens and per million reply tokens.
      chosen: Further fields of :class:`EndpointOptions`.

    Raises:
      RunError: Only one of URL and model is given, or a price without them.
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
    """Return an answer or a part of it, quoted for a message; an answer that contains the key is not shown."""
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
