"""How much a client of the server may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a client may ask for.

    Attributes:
      bytes: of a request's body.
      items: responses of a request.
      waiting: responses of all requests that are not answered yet.
      connections: that are open at a time.
      seconds: from the first byte of a request to its answer.
    """

    bytes: int = 16_000_000
    items: int = 1024
    waiting: int = 8192
    connections: int = 2048
    seconds: float = 120.0
