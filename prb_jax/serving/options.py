"""The options of `prb serve`, and its limits for clients. This module does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass, field

from prb_jax.behaviour.judges.options import JudgeOptions
from prb_jax.errors import short_repr
from prb_jax.records.options import option, section
from prb_jax.scoring import HISTORY
from prb_jax.scoring.options import Data
from prb_jax.scoring.remote import TOKEN
from prb_jax.text.view import ViewOptions


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the requests of clients."""

    bytes: int = option(16_000_000, "bytes of a request", least=1, flag="max-bytes")
    items: int = option(1024, "responses of a request", least=1, flag="max-items")
    waiting: int = option(8192, "responses that may wait for their scores", least=1, flag="max-waiting")
    connections: int = option(2048, "connections at a time", least=1, flag="max-connections")
    seconds: float = option(120.0, "seconds until a request is answered", least=1, flag="timeout")

    __repr__ = short_repr


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where, to whom and how a model is served.

    Attributes:
      token: Token that clients must send; None requires no token.
      judge: Options of a judge.
    """

    host: str = option(
        "127.0.0.1",
        f"address (default: 127.0.0.1, this machine only); another one requires a token in {TOKEN}",
        "HOST",
    )
    port: int = option(8000, "port (default: 8000); 0 picks a free one", "P", least=0)
    token: str | None = field(default=None, repr=False)
    view: ViewOptions = section(ViewOptions)
    batch_tokens: int | None = option(None, "approximate number of tokens computed at a time", least=1)
    prefix_cache: int | None = option(
        None,
        "memory in megabytes for keys and values of recent prefixes; 0 turns the cache off (default: an eighth of the "
        "machine's memory, if the model can keep prefixes)",
        "MB",
        least=0,
    )
    judge: JudgeOptions | None = None
    limits: Limits = section(Limits)
    history: Data | None = option(None, f"{HISTORY} (default: only their posts)", "NAME_OR_PATH ...")

    __repr__ = short_repr
