"""A scorer behind `prb serve`'s application, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from prb_jax.serving.app import make_app
from prb_jax.serving.connections import address, bind, run_app
from prb_jax.serving.options import Limits, ServeOptions
from prb_jax.serving.serve import make_served


def start_app(app: Any, limits: Limits) -> str:
    """The URL of an application; it ends with the process."""
    listening, ready = bind("127.0.0.1", 0), threading.Event()
    options = {"limits": limits, "ready": ready.set}
    threading.Thread(target=run_app, args=(app, listening), kwargs=options, daemon=True).start()
    assert ready.wait(300)
    return address(listening)


@contextlib.contextmanager
def serving(scorer: Any, **options: Any) -> Iterator[str]:
    """The URL of a server of the scorer."""
    served = make_served(scorer, ServeOptions(**options))
    yield start_app(make_app(served), served.options.limits)
    served.close()
